"""Continuous batching: sessions in rows of a KV cache, every busy row one sampled token further per forward pass.

Not thread-safe: one caller at a time. The torch engine puts it on one thread; nothing here waits.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.engines.base import EngineError, Generation
from inference.engines.llama import Llama
from schemas.trajectory import WeightVersionSpan

MAX_CHUNK = 128
"""Tokens of a prompt or observation that a row reads in one forward pass."""

SPARSE = 4
"""Below one busy row in this many, only the busy rows are computed (at the price of a copy of their cache)."""

_UNIT = 2.0**-24
"""Uniform numbers are multiples of this: exact in float32, and below 1."""


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`, in its session's row once admitted."""

    session: str
    token_ids: list[int]
    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    rng: random.Random
    cancelled: bool = False
    started_s: float = 0.0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)

    def take(self, token: int, logprob: float, version: int) -> bool:
        """Append a sampled token, stamped with the version that sampled it; returns whether the request is complete."""
        start = len(self.sampled)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.token_ids.append(token)
        self.sampled.append(token)
        self.logprobs.append(logprob)
        self.spans.append(WeightVersionSpan(start, len(self.sampled), version))
        return token in self.stop_ids or len(self.sampled) >= self.max_new_tokens

    def generation(self, accelerator_s: float) -> Generation:
        """What was sampled."""
        stopped = bool(self.sampled) and self.sampled[-1] in self.stop_ids
        return Generation(tuple(self.sampled), tuple(self.logprobs), tuple(self.spans), stopped, accelerator_s)


@dataclass(slots=True)
class Row:
    """A row of the cache: `cached` are the tokens whose keys and values it holds, from position 0 on."""

    session: str | None = None
    cached: list[int] = field(default_factory=list)
    request: Request | None = None
    used: int = 0

    def clear(self) -> None:
        """Forget the session."""
        self.session, self.cached, self.request = None, [], None


class Sampler:
    """Rows, and the weights that advance them."""

    def __init__(self, llama: Llama, version: int, num_rows: int, length: int):
        """`length` is the longest context of a row, in tokens; beyond the model's positions it is refused."""
        if length > llama.shape.max_positions:
            raise EngineError(f"contexts of {length} tokens; the model has {llama.shape.max_positions} positions")
        self.version = version
        self.length = length
        self.busy_s = 0.0
        self.num_tokens = 0
        """Tokens fed or sampled since the start."""
        self._llama = llama
        self._cache = llama.cache(num_rows, length)
        self._rows = [Row() for _ in range(num_rows)]
        self._of_session: dict[str, int] = {}
        self._num_admitted = 0
        self._share_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether any row has a request."""
        return any(r.request for r in self._rows)

    def admit(self, request: Request) -> bool:
        """Give `request` its session's row, a free one, or the one idle for longest; False when all are busy."""
        index = self._of_session.get(request.session)
        if index is None:
            index = self._free_row()
        if index is None:
            return False
        row = self._rows[index]
        self._of_session[request.session] = index
        self._num_admitted += 1
        row.session, row.request, row.used = request.session, request, self._num_admitted
        row.cached = row.cached[: _common(row.cached, request.token_ids)]
        request.started_s = self._share_s
        return True

    def release(self, session: str) -> None:
        """Free the row of `session`, if it has one."""
        index = self._of_session.pop(session, None)
        if index is not None:
            self._rows[index].clear()

    def swap(self, llama: Llama, version: int) -> None:
        """Sample with other weights from now on; only rows with a request keep what the old ones cached.

        Raises:
            EngineError: the new weights have another shape.
        """
        if llama.shape != self._llama.shape:
            raise EngineError(f"version {version} has shape {llama.shape}; this engine serves {self._llama.shape}")
        self._llama, self.version = llama, version
        for row in self._rows:
            if row.request is None:
                row.cached = []

    def advance(self) -> list[tuple[Request, Generation]]:
        """Read what is unread, sample one token for every busy row; returns the requests that are complete by it."""
        begun = time.perf_counter()
        for row in self._rows:
            if row.request and row.request.cancelled:
                row.request = None
        busy = [i for i, r in enumerate(self._rows) if r.request]
        if not busy:
            return []
        self._read(busy)
        complete = self._sample(busy)
        elapsed = time.perf_counter() - begun
        self.busy_s += elapsed
        self._share_s += elapsed / len(busy)
        return [(r, r.generation(self._share_s - r.started_s)) for r in complete]

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of token_ids[1:] at temperature 1."""
        return self._llama.logprobs(list(token_ids))

    def drop(self) -> list[Request]:
        """Take every request out of its row and forget every session."""
        requests = [r.request for r in self._rows if r.request]
        self._of_session.clear()
        for row in self._rows:
            row.clear()
        return requests

    def _free_row(self) -> int | None:
        """The first free row, so that busy ones stay dense at the front."""
        for index, row in enumerate(self._rows):
            if row.session is None:
                return index
        idle = [i for i, r in enumerate(self._rows) if r.request is None]
        if not idle:
            return None
        index = min(idle, key=lambda i: self._rows[i].used)
        self.release(self._rows[index].session or "")
        return index

    def _read(self, busy: list[int]) -> None:
        """Bring the cache of each row up to all of its tokens but the last, which is fed when it is sampled from.

        Rows shorter than the widest are padded: what padding writes lies beyond a row's tokens, where nothing looks
        before the true token has been written.
        """
        while True:
            pending = [(i, _unread(self._rows[i])) for i in busy]
            pending = [(i, unread) for i, unread in pending if unread]
            if not pending:
                return
            width = max(len(unread) for _, unread in pending)
            starts = torch.tensor([len(self._rows[i].cached) for i, _ in pending])
            tokens = torch.tensor([unread + [0] * (width - len(unread)) for _, unread in pending])
            positions = (starts.unsqueeze(1) + torch.arange(width)).clamp_(max=self.length - 1)
            self._llama.forward(tokens, positions, self._cache, torch.tensor([i for i, _ in pending]))
            for i, unread in pending:
                self._rows[i].cached += unread
                self.num_tokens += len(unread)

    def _sample(self, busy: list[int]) -> list[Request]:
        """Feed each row's last token and sample the next.

        While most rows are busy the idle ones are computed too, because a slice of the cache is not copied; what they
        write lies just beyond their tokens.
        """
        dense = len(busy) * SPARSE > busy[-1] + 1
        indices = list(range(busy[-1] + 1)) if dense else busy
        rows = [self._rows[i] for i in indices]
        tokens = torch.tensor([[r.request.token_ids[-1] if r.request else 0] for r in rows])
        positions = torch.tensor([[len(r.cached)] for r in rows])
        select = slice(0, len(rows)) if dense else torch.tensor(indices)
        hidden = self._llama.forward(tokens, positions, self._cache, select)
        picks, logprobs = choose(
            self._llama.logits(hidden[:, 0]),
            torch.tensor([r.request.temperature if r.request else 1.0 for r in rows]),
            torch.tensor([r.request.rng.getrandbits(24) * _UNIT if r.request else 0.0 for r in rows]),
        )
        complete: list[Request] = []
        for row, token, logprob in zip(rows, picks, logprobs, strict=True):
            if row.request is None:
                continue
            row.cached.append(row.request.token_ids[-1])
            self.num_tokens += 1
            if row.request.take(token, logprob, self.version):
                complete.append(row.request)
                row.request = None
        return complete


@torch.inference_mode()
def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[list[int], list[float]]:
    """Sample a token for each row by inverting the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: [R, V].
        temperatures: [R]; 0 takes the likeliest token.
        uniforms: [R], in [0, 1).

    Returns:
        Tokens and their logprobs under the distribution they were sampled from (0 at temperature 0).

    Raises:
        EngineError: the logits are not finite.
    """
    greedy = temperatures == 0
    logprobs = (logits / temperatures.masked_fill(greedy, 1.0).unsqueeze(1)).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    threshold = uniforms.unsqueeze(1) * cumulative[:, -1:]  # rounding makes the last entry differ from 1
    picks = (cumulative <= threshold).sum(-1)
    chosen = logprobs.gather(1, picks.unsqueeze(1)).squeeze(1)
    if bool(greedy.any()):
        picks = torch.where(greedy, logits.argmax(-1), picks)
        chosen = chosen.masked_fill(greedy, 0.0)
    if not bool(chosen.isfinite().all()):
        raise EngineError("logits are not finite; the weights that are served are broken")
    return picks.tolist(), chosen.tolist()


def _unread(row: Row) -> list[int]:
    """The next tokens of the row's context that are not in its cache, the last one left out."""
    tokens = row.request.token_ids if row.request else []
    start = len(row.cached)
    return tokens[start : min(len(tokens) - 1, start + MAX_CHUNK)]


def _common(cached: list[int], tokens: list[int]) -> int:
    """How many tokens of `cached` the context starts with; its last token is always fed anew."""
    limit = min(len(cached), len(tokens) - 1)
    if cached[:limit] == tokens[:limit]:
        return limit
    return next(i for i in range(limit) if cached[i] != tokens[i])
