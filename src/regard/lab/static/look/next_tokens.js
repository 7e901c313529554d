// The names of next tokens in a table: different tokens have different names.
const VISIBLE = { " ": "␣", "\u00a0": "⍽", "\n": "↵", "\r": "␍", "\t": "⇥" };

// Every character of a label as something that can be seen: spaces at the ends tell tokens apart too.
export function exactText(label) {
  const visible = label.replace(/[ \u00a0\n\r\t]/g, (character) => VISIBLE[character]);
  return visible.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}]/gu, (character) => {
    return `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// The names of tokens ({ id, token }). Tokens with the same text are told apart by their ids.
export function tokenNames(tokens) {
  const texts = tokens.map(({ token }) => exactText(token));
  return tokens.map(({ id }, i) => {
    const isUnique = texts.indexOf(texts[i]) === texts.lastIndexOf(texts[i]);
    return isUnique ? `“${texts[i]}”` : `“${texts[i]}” (id ${id})`;
  });
}
