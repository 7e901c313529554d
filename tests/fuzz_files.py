"""Damage files of every kind and give them to every reader: no crash, no hang, no unexpected error, nothing deleted.

    python tests/fuzz_files.py --seconds 600                 random damage, until the time is up
    python tests/fuzz_files.py --cases 1000 --kinds model    a number of cases of some kinds
    python tests/fuzz_files.py --corpus                      the damage in tests/corpus, which was found earlier
    python tests/fuzz_files.py --case 123 --kinds model      one case, in this process

A finding is printed with its case and its edits. As a line of tests/corpus/KIND.jsonl the edits are tried in every run
of the tests. Files of findings are written to build/fuzz-files. pytest does not collect this file; `make fuzz-files`
runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.native_module import use_tested_module

use_tested_module()

import torch  # noqa: E402 (after the native module that is tested)
from support import file_readers, file_seeds  # noqa: E402
from support.attempts import Attempts, snapshot  # noqa: E402
from support.case_pool import CasePool  # noqa: E402
from support.mutations import Edit, Files, apply_edits, write_files  # noqa: E402
from support.random_edits import random_edits  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "corpus"
FOUND = ROOT / "build" / "fuzz-files"


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    - ``seeds``: builds the valid files, by name.
    - ``use``: uses a folder with damaged files in every way.
    - ``targets``: the files that are damaged, by the beginnings of their names.
    - ``writes``: whether the use may change the files; if not, that is a finding.
    """

    seeds: Callable[[], dict[str, Files]]
    use: Callable[[Attempts, Path, Path], None]
    targets: tuple[str, ...] = ("",)
    writes: bool = False


RUN_TARGETS = ("checkpoints/", "run.json", "recipe.toml", "metrics.jsonl", "result.json")
KINDS = {
    "recording": Kind(file_seeds.recordings, file_readers.use_recording),
    "model": Kind(file_seeds.model_folders, file_readers.use_model),
    "gguf": Kind(file_seeds.gguf_files, file_readers.use_gguf),
    "preprocessor": Kind(
        file_seeds.preprocessors, file_readers.use_preprocessor, ("preprocessor_config.json", "picture.png")
    ),
    "tokenizer": Kind(file_seeds.tokenizers, file_readers.use_tokenizer, ("tokenizer.json",)),
    "recipe": Kind(file_seeds.recipes, file_readers.use_recipe),
    "checkpoint": Kind(cache(file_seeds.runs), file_readers.use_checkpoint, RUN_TARGETS, writes=True),
    "record": Kind(file_seeds.runs, file_readers.use_record, ("evolution/",)),
    "lab": Kind(file_seeds.lab_states, file_readers.use_lab_state, writes=True),
}


@dataclass(frozen=True)
class Case:
    """One case: a number from which the edits are drawn, or edits of the corpus."""

    kind: str
    number: int = 0
    seed: str = ""
    edits: tuple[Edit, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if not self.seed else f"{self.kind} of the corpus"


@cache
def seeds(kind: str) -> dict[str, Files]:
    """Return the valid files of a kind, which are built once."""
    return KINDS[kind].seeds()


def damage(case: Case) -> tuple[str, list[Edit]]:
    """Return the name of the seed and the edits of a case."""
    if case.seed:
        return case.seed, list(case.edits)
    rng = random.Random(f"{case.kind} {case.number}")
    seed = rng.choice(sorted(seeds(case.kind)))
    files = seeds(case.kind)[seed]
    # A part of the targets first: a folder with many weights has one small file that decides about all of them.
    start = rng.choice(KINDS[case.kind].targets)
    targets = [name for name in files if name.startswith(start)]
    folders = sorted({name.rpartition(".")[2] for name in targets})
    suffix = rng.choice(folders)
    return seed, random_edits(rng, files, [name for name in targets if name.endswith(suffix)])


def run_case(case: Case) -> list[str]:
    """Damage the files, use them, and return the findings."""
    kind = KINDS[case.kind]
    seed, edits = damage(case)
    files = apply_edits(seeds(case.kind)[seed], edits, strict=bool(case.seed))
    attempt = Attempts(case.number)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(temporary) / case.kind
        scratch = Path(temporary) / "scratch"
        folder.mkdir()
        scratch.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        os.environ["XDG_STATE_HOME"] = str(scratch / "state home")
        write_files(files, folder)
        before = snapshot(folder)
        kind.use(attempt, folder, scratch)
        if not kind.writes:
            after = snapshot(folder)
            changed = [name for name in before if after.get(name) != before[name]]
            attempt.expect("reading", not changed, f"it changed or removed {changed}")
    return list(dict.fromkeys(attempt.findings))


def corpus_cases(kinds: Sequence[str]) -> list[Case]:
    """Return the damage that was found earlier."""
    cases = []
    for kind in kinds:
        file = CORPUS / f"{kind}.jsonl"
        if not file.is_file():
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            cases.append(Case(kind, seed=entry["seed"], edits=tuple(entry["edits"])))
    return cases


def random_cases(kinds: Sequence[str], first: int, count: int | None, end: float) -> Iterator[Case]:
    """Yield cases of all kinds in turn, until there are enough or the time is up."""
    number = first
    while count is None or number < first + count:
        for kind in kinds:
            if time.monotonic() > end:
                return
            yield Case(kind, number)
        number += 1


def shorten(case: Case, findings: list[str]) -> list[Edit]:
    """Return the edits of a case without those that the finding does not need."""
    seed, edits = damage(case)
    wanted = place_of(findings[0])
    for edit in list(edits):
        fewer = [other for other in edits if other is not edit]
        if fewer and wanted in map(place_of, run_case(Case(case.kind, seed=seed, edits=tuple(fewer)))):
            edits = fewer
    return edits


def place_of(finding: str) -> str:
    """Return what identifies a finding: the error and the line of the code, whatever the use of the file was."""
    use, _, rest = finding.partition(": ")
    if " at " in rest:
        return rest.split(": ")[0]
    return finding[:120]


def report(case: Case, findings: list[str], *, seen: Counter[str]) -> None:
    """Print a finding the first few times that it occurs, and store its files."""
    seed, edits = damage(case)
    for finding in findings:
        key = place_of(finding)
        seen[key] += 1
        if seen[key] > 2:
            continue
        print(f"{case}: {finding}", flush=True)
        print("   ", json.dumps({"seed": seed, "edits": edits}), flush=True)
    if case.seed:
        return
    folder = FOUND / f"{case.kind}-{case.number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_files(apply_edits(seeds(case.kind)[seed], edits), folder / case.kind)
    (folder / "findings.txt").write_text("\n".join([*findings, json.dumps({"seed": seed, "edits": edits})]) + "\n")


def main() -> int:
    """Run the cases that the command line asks for. Returns 1 if there is a finding."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cases", type=int)
    parser.add_argument("--first", type=int, help="the number of the first case; the time by default")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--corpus", action="store_true")
    parser.add_argument("--case", type=int)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    torch.set_num_threads(1)
    for kind in kinds:
        # Undamaged files first: this imports everything once, before processes are forked.
        undamaged = run_case(Case(kind, seed=next(iter(seeds(kind)))))
        if undamaged:
            print(f"{kind}: undamaged files have findings: {undamaged}")
            return 1
    seen: Counter[str] = Counter()
    if options.case is not None:
        case = Case(kinds[0], options.case)
        findings = run_case(case)
        report(case, findings, seen=seen)
        if findings:
            print("shorter:", json.dumps({"seed": damage(case)[0], "edits": shorten(case, findings)}))
        return int(bool(findings))

    start = time.monotonic()
    first = int(time.time()) if options.first is None else options.first
    cases: list[Any] = []
    if options.corpus:
        cases += corpus_cases(kinds)
    counts: Counter[str] = Counter()
    failed = 0

    def all_cases() -> Iterator[Case]:
        yield from cases
        if options.cases or options.seconds < float("inf"):
            yield from random_cases(kinds, first, options.cases, start + options.seconds)

    with tempfile.TemporaryDirectory() as folder:
        for case, findings in CasePool(run_case, options.processes, Path(folder)).results(all_cases()):
            counts[case.kind] += 1
            if findings:
                failed += 1
                report(case, findings, seen=seen)
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{sum(counts.values())} cases in {time.monotonic() - start:.0f} s ({total}): {failed} with findings")
    for finding, count in seen.most_common():
        print(f"  {count} × {finding}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
