"""Who runs and who waits: requests in, first come first served, as many as the KV cache and the token budget hold.

The running requests are a list without holes: position is cache row. Those that join in a step stand at its end. A request
that no longer fits goes back to the front of the waiting ones with its tokens, the newest first, and is computed again.

Keys and values of a prefix that another request has computed with the same weights are copied (`prefix`). A request whose
prefix is being computed waits for it, so that the samples of a group compute their prompt once. In deterministic mode
nothing is shared, a prompt is computed whole, and a response that is computed again goes token by token: each request
is computed in the same pieces, whatever else runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from miles.engine.local.kv_cache import KVCache
from miles.engine.local.prefix import Found, PrefixCache
from miles.engine.local.sequence import Sequence


class Scheduler:
    """``prefill_tokens`` bounds the tokens that join in one step; a longer request joins alone, in parts.

    ``prefix_tokens`` bounds what is kept of ended requests, in tokens; 0 keeps nothing and shares nothing.
    """

    def __init__(
        self, cache: KVCache, prefill_tokens: int, prefix_tokens: int = 0, *, deterministic: bool = False
    ) -> None:
        self.cache = cache
        self.deterministic = deterministic
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefill_tokens = prefill_tokens
        self._prefixes = PrefixCache(0 if deterministic else prefix_tokens)
        self._epoch = 0
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Makes room for one more token of each running request, then lets waiting ones join; returns those."""
        longest = self._make_room()
        kept, budget = len(self.running), self._prefill_tokens - sum(c for c in self.counts() if c > 1)
        later: list[Sequence] = []
        found: list[Found] = []
        while self.waiting and budget > 0:
            candidate = self.waiting[0]
            if len(self.running) >= self.cache.rows_for(max(longest, candidate.length)):
                break
            match = self._prefixes.find(candidate, self.running, self._epoch)
            if match.being_computed:
                later.append(self.waiting.popleft())
                continue
            cost = candidate.length - match.length
            if cost > budget and (len(self.running) > kept or budget < self._prefill_tokens):
                break
            budget -= cost
            longest = max(longest, candidate.length)
            candidate.cached, candidate.epoch = match.length, self._epoch
            if not candidate.output_ids:
                candidate.cached_tokens = match.length
            self.running.append(self.waiting.popleft())
            found.append(match)
        self.waiting.extendleft(reversed(later))
        self.cache.fit(len(self.running), longest, kept)
        for row, match in enumerate(found, start=kept):
            match.copy_into(self.cache, row)
        return self.running[kept:]

    def counts(self) -> list[int]:
        """How many tokens of each running request the next step computes."""
        return [self._count(s) for s in self.running]

    def computed(self) -> None:
        """The step computed the tokens of `counts`."""
        for sequence in self.running:
            sequence.cached += self._count(sequence)

    def forget(self) -> None:
        """The weights are others now: nothing that is cached may be shared any more."""
        self._epoch += 1
        self._prefixes.clear()

    def _count(self, sequence: Sequence) -> int:
        missing = sequence.length - sequence.cached
        if self.deterministic:
            return len(sequence.prompt_ids) if sequence.cached == 0 else 1
        return min(missing, self._prefill_tokens)

    def remove_ended(self) -> list[Sequence]:
        """Takes the ended requests out, and closes the holes that they leave in the cache."""
        rows = [row for row, sequence in enumerate(self.running) if sequence.ended]
        for row in rows:
            self._keep(row)
        gone = [self._take(row) for row in reversed(rows)]
        if any(s.ended for s in self.waiting):
            gone += [s for s in self.waiting if s.ended]
            self.waiting = deque(s for s in self.waiting if not s.ended)
        return gone

    def retract(self) -> None:
        """Sends all running requests back to the waiting ones, in the order in which they came."""
        self.waiting.extendleft(sorted(self.running, key=lambda s: s.arrival, reverse=True))
        for sequence in self.running:
            sequence.cached = 0
        self.running.clear()

    def find(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        return [s for s in (*self.running, *self.waiting) if wanted(s)]

    def _make_room(self) -> int:
        """Sends the newest requests back until the rest fits; returns the longest one's tokens."""
        longest = max((s.length for s in self.running), default=0)
        while len(self.running) > self.cache.rows_for(longest):
            newest = max(range(len(self.running)), key=lambda row: self.running[row].arrival)
            back = self._take(newest)
            back.cached = 0
            self.waiting.appendleft(back)
            longest = max(s.length for s in self.running)
        return longest

    def _keep(self, row: int) -> None:
        """Keeps what an ended request has cached; erases what may hold NaN, because no logits vouched for it yet."""
        sequence = self.running[row]
        if sequence.failure is not None or sequence.cached < sequence.length - 1:
            self.cache.erase(row)
        elif sequence.epoch == self._epoch:
            self._prefixes.keep(sequence, lambda: self.cache.read(row, sequence.cached))

    def _take(self, row: int) -> Sequence:
        """Removes a running request; the last one moves into its row."""
        taken, last = self.running[row], self.running.pop()
        if row < len(self.running):
            self.running[row] = last
            self.cache.copy(len(self.running), row, last.cached)
        return taken
