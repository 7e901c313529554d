"""Recognise models that read sound: they can be observed in Python, but not by the command line and the lab."""

from __future__ import annotations

from pathlib import Path

from regard._config_json import read_json
from regard._errors import RegardError


def reads_audio(folder: Path) -> bool:
    """Whether the model of a folder reads sound: its files name mel bands or a sampling rate.

    >>> reads_audio(regard.models.bundled())
    False
    """
    for name, entry in (("config.json", "num_mel_bins"), ("preprocessor_config.json", "sampling_rate")):
        try:
            if entry in read_json(folder / name):
                return True
        except (OSError, RegardError):
            continue  # this file says nothing; whoever loads the model says what is wrong with it
    return False
