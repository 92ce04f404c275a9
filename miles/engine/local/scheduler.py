"""Who runs and who waits: requests in, first come first served, as many as the KV cache and the token budget hold.

The running requests are a list without holes: position is cache row. Those that join in a step stand at its end. A request
that no longer fits goes back to the front of the waiting ones with its tokens, the newest first, and is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from miles.engine.local.kv_cache import KVCache
from miles.engine.local.sequence import Sequence


class Scheduler:
    """``prefill_tokens`` bounds the tokens that join in one step (one request always may)."""

    def __init__(self, cache: KVCache, prefill_tokens: int) -> None:
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefill_tokens = prefill_tokens
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Makes room for one more token of each running request, then lets waiting ones join; returns those."""
        longest = self._make_room()
        kept, budget = len(self.running), self._prefill_tokens
        while self.waiting:
            candidate = self.waiting[0]
            if len(self.running) >= self.cache.rows_for(max(longest, candidate.length)):
                break
            if candidate.length > budget and len(self.running) > kept:
                break
            budget -= candidate.length
            longest = max(longest, candidate.length)
            self.running.append(self.waiting.popleft())
        self.cache.fit(len(self.running), longest, kept)
        return self.running[kept:]

    def remove_ended(self) -> list[Sequence]:
        """Takes the ended requests out, and closes the holes that they leave in the cache."""
        rows = [row for row, sequence in enumerate(self.running) if sequence.ended]
        gone = [self._take(row) for row in reversed(rows)]
        if any(s.ended for s in self.waiting):
            gone += [s for s in self.waiting if s.ended]
            self.waiting = deque(s for s in self.waiting if not s.ended)
        return gone

    def retract(self) -> None:
        """Sends all running requests back to the waiting ones, in the order in which they came."""
        self.waiting.extendleft(sorted(self.running, key=lambda s: s.arrival, reverse=True))
        self.running.clear()

    def find(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        return [s for s in (*self.running, *self.waiting) if wanted(s)]

    def _make_room(self) -> int:
        """Sends the newest requests back until the rest fits; returns the longest one's tokens."""
        longest = max((s.length for s in self.running), default=0)
        while len(self.running) > self.cache.rows_for(longest):
            newest = max(range(len(self.running)), key=lambda row: self.running[row].arrival)
            self.waiting.appendleft(self._take(newest))
            longest = max(s.length for s in self.running)
        return longest

    def _take(self, row: int) -> Sequence:
        """Removes a running request; the last one moves into its row."""
        taken, last = self.running[row], self.running.pop()
        if row < len(self.running):
            self.running[row] = last
            self.cache.move(len(self.running), row, last.length)
        return taken
