// Settings that the browser keeps. It may refuse storage, for example in private windows: then nothing is remembered.
export function readSetting(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

// null removes the setting.
export function writeSetting(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    // Nothing is remembered.
  }
}
