"""The ranks of a process group as a ring: messages to the next rank, agreement on a call, errors about lost ranks."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from regard._devices import finish_threads_at_exit
from regard._errors import RankError, RegardError

# What gloo says about other processes; torch has no class for these errors.
TIMED_OUT = ("timed out", "timeout")
CLOSED = ("connection closed", "connection reset", "connection refused", "broken pipe", "socket closed")

# A gloo group does not work any more after such an error.
RESTART = "; start all processes again"

# Every operation first sends this many numbers: checksum, bytes of the description, whether this rank refuses the call,
# and numbers of the operation. The size never differs, so ranks that make different operations find that out.
HEADER = 5
MOST_BYTES = 4096  # of a description that is exchanged after a disagreement


@dataclass(frozen=True)
class Ring:
    """A process group as a ring: rank r sends to rank r + 1, and the last rank to rank 0."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> Ring:
        """Return the ring of a group (None: the default group), or of one process if no group is initialised."""
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise RegardError("group was given, but torch.distributed is not initialised: call init_process_group")
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise RegardError(f"this process (rank {dist.get_rank()} of all) is not a member of the group")
        finish_threads_at_exit()
        return cls(group, rank, dist.get_world_size(group))

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        """Return the numbers of every rank, by rank."""
        return self.gather_tensors(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()

    def gather_tensors(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked; they must have equal sizes."""
        received = [torch.empty_like(own) for _ in range(self.size)]
        with name_lost_ranks():
            dist.all_gather(received, own, group=self.group)
        return torch.stack(received)

    def sum_over_all(self, x: Tensor) -> None:
        """Replace x by its sum over all ranks; x must have equal sizes on all ranks."""
        with name_lost_ranks():
            dist.all_reduce(x, group=self.group)

    def pass_on(self, sent: Tensor, length: int) -> Tensor:
        """Send ``sent [B, G, m, width]`` to the next rank; return the ``length`` keys that the previous rank sent."""
        received = sent.new_empty(*sent.shape[:2], length, sent.shape[3])
        messages = []
        # Both sides know the lengths, so an empty message is neither sent nor awaited.
        if sent.numel():
            after = (self.rank + 1) % self.size
            messages.append(dist.P2POp(dist.isend, sent.contiguous(), group=self.group, group_peer=after))
        if received.numel():
            before = (self.rank - 1) % self.size
            messages.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=before))
        if messages:
            with name_lost_ranks():
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
        return received

    def agree(self, call: Mapping[str, object], numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Compare this call with those of the other ranks before anything else is sent.

        - ``call``: everything that must be equal on all ranks, by name, ``operation`` first.
        - ``numbers``: at most two numbers of this rank that may differ.

        Returns the numbers of every rank, by rank. Raises the same ``RegardError`` on all ranks if the calls differ or
        one rank refused its call: the ranks would wait for messages that never come, or read those of another call.
        """
        names = {name: str(value) for name, value in call.items()}
        return self._exchange(names, numbers, device)

    @contextmanager
    def tell_refusal(self, device: torch.device) -> Iterator[None]:
        """If the block raises an error about this rank's arguments, tell the other ranks, which wait in ``agree``."""
        try:
            yield
        except Exception as error:
            if self.size > 1:
                # This rank raises its own error, also if the others cannot be told or refuse their calls too.
                with suppress(RegardError, RuntimeError):
                    self._exchange({"refusal": " ".join(str(error).split())}, [], device)
            raise

    def _exchange(self, call: dict[str, str], numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Exchange checksums and numbers of a call, and its description only if the ranks do not agree."""
        text = json.dumps(call).encode()
        refuses = int("refusal" in call)
        padding = [0] * (HEADER - 3 - len(numbers))
        header = [zlib.crc32(text), len(text), refuses, *numbers, *padding]
        headers = self.gather_tensors(torch.tensor(header, dtype=torch.int64, device=device)).tolist()
        checksums = {row[0] for row in headers}
        if len(checksums) == 1 and not refuses:
            return [row[3 : 3 + len(numbers)] for row in headers]

        # All ranks have the same headers, so all of them come here.
        width = min(MOST_BYTES, max(row[1] for row in headers))
        content = torch.zeros(width, dtype=torch.uint8)
        content[: len(text)] = torch.frombuffer(bytearray(text[:width]), dtype=torch.uint8)
        received = self.gather_tensors(content.to(device)).cpu()
        calls = []
        for row, data in zip(headers, received, strict=True):
            calls.append(_read_call(bytes(data[: row[1]].tolist())))
        raise RegardError(_describe_difference(calls))


def _read_call(text: bytes) -> dict[str, str]:
    """Return the description of another rank's call; one that was too long to be sent whole is one entry."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {"call": text.decode(errors="replace")}


def _describe_difference(calls: list[dict[str, str]]) -> str:
    """Name the ranks that refused their calls, or the first entry in which the calls differ."""
    for rank, call in enumerate(calls):
        if "refusal" in call:
            return f"rank {rank} refused its call: {call['refusal']}"
    # In the order of the calls: the operation first.
    names: dict[str, None] = {}
    for call in calls:
        names |= dict.fromkeys(call)
    for name in names:
        ranks: dict[str, list[str]] = {}
        for rank, call in enumerate(calls):
            ranks.setdefault(call.get(name, "absent"), []).append(str(rank))
        if len(ranks) > 1:
            values = "; ".join(f"{value} on rank {', '.join(where)}" for value, where in ranks.items())
            return f"the ranks make different calls: {name} is {values}; it must be equal on all ranks"
    return "the ranks make different calls; they must be equal on all ranks"


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """Turn an error of torch about another process into a ``RankError``; other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        reason = describe_lost_rank(error)
        if reason is None:
            raise
        raise RankError(reason + RESTART) from None


def describe_lost_rank(error: RuntimeError) -> str | None:
    """Return in a few words what happened to another process; None if the error is not about one."""
    if isinstance(error, RankError):
        return str(error).removesuffix(RESTART)
    text = " ".join(str(error).split()).lower()
    if any(words in text for words in TIMED_OUT):
        limit = "the timeout"
        milliseconds = re.search(r"(\d+) ?ms", text)
        if milliseconds is not None:
            limit = f"{int(milliseconds[1]) / 1000:g} s ({limit})"
        return f"another process of the group did not answer within {limit}: it has died or is too slow"
    if any(words in text for words in CLOSED):
        return "another process of the group was lost: it has ended"
    return None
