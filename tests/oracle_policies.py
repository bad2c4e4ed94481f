"""The policies once more, from what their descriptions say, for the oracle."""

from __future__ import annotations

from functools import cache

from oracle import DEVICE, HOST, History, Node, Oracle, OraclePolicy

# More retrievals than a trace has.
LONG = 2**20


class Lru(OraclePolicy):
    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        return node.last_use


class Pgdsf(OraclePolicy):
    def __init__(self, frequency: str) -> None:
        self._frequency = frequency

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        frequency = node.frequency if self._frequency == "node" else node.uses
        return oracle.clock[tier] + frequency * node.cost


class Gdsf(OraclePolicy):
    """By itself a document costs the same for each of its tokens."""

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        return oracle.clock[tier] + node.frequency


class Lfu(OraclePolicy):
    """The longer unused one of two that were used equally often."""

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        return node.frequency + node.last_use / LONG


class Slru(OraclePolicy):
    """All that were used once leave before any other."""

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        return node.last_use + (LONG if node.frequency > 1 else 0)


class WTinyLfu(Slru):
    """A victim of the device takes a place on host that its uses of late are worth."""

    def __init__(self) -> None:
        self._uses: dict[History, list[int]] = {}

    def used(self, history: History, oracle: Oracle) -> None:
        super().used(history, oracle)
        self._uses.setdefault(history, []).append(oracle.now)

    def admits(self, kept: list[Node], displaced: list[Node], oracle: Oracle) -> bool:
        used, used_there = (
            sum(
                node.tokens * 0.5 ** ((oracle.now - use) / 50_000)
                for node in nodes
                for use in self._uses.get(node.history, [])  # type: ignore[arg-type]
            )
            for nodes in (kept, displaced)
        )
        return not displaced or used > used_there


class S3Fifo(OraclePolicy):
    """A pass of the main queue for those known or hit twice, and one more a hit up to three;
    the eighth of a pass for others, and nothing for what no request has read."""

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        hits, was_known = node.frequency - 1, node.document_frequency > node.frequency
        passes = 1 / 8 if hits < 2 and not was_known else 1 + min(hits, 3)
        return oracle.clock[tier] + (passes if node.frequency else 0)


class Adaptive(OraclePolicy):
    """Scores as of now: nothing holds."""

    def __init__(self, alpha: float = 0.5, beta: float = 0.3, gamma: float = 0.2) -> None:
        self._weights = alpha, beta, gamma
        self._most_uses = self._most_tokens = 1
        # Frequency scales and the times from which they apply.
        self._scales = [(0, 1)]

    def seen(self, node: Node, oracle: Oracle) -> None:
        self._most_uses = max(self._most_uses, node.uses)
        self._most_tokens = max(self._most_tokens, node.tokens)
        applies_from, scale = self._scales[-1]
        if applies_from <= oracle.now and scale < self._most_uses:
            self._scales.append((oracle.now + max(1, oracle.now // 16), self._most_uses))

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        alpha, beta, gamma = self._weights
        scale = next(scale for start, scale in reversed(self._scales) if start <= oracle.now)
        frequency, size = node.uses / scale, node.tokens / self._most_tokens
        # All times `now`: two scores that are equal but for rounding must be so here, too.
        return (alpha * frequency - gamma * size) * oracle.now + beta * node.last_use

    def holds_until(self, node: Node, oracle: Oracle) -> float:
        return 0


class PgdsfPlus(OraclePolicy):
    """Prefill seconds saved by a token at the rate at which its path is expected to be used.

    Args:
        ghosts: Document paths whose history is remembered, and documents whose topic is.
    """

    gives_up_duplicates = True
    rises = True
    half_lives = (100.0, 3_000.0, 50_000.0)

    def __init__(self, ghosts: int) -> None:
        self.ghosts = ghosts
        self._histories: list[History] = []
        # By group and half-life: uses that were attributed and predicted, of late.
        self._attributed: dict[tuple[object, float], float] = {}
        self._predicted: dict[tuple[object, float], float] = {}
        self._published_at = 1
        self._published: dict[tuple[object, float], float] = {}

    def retrieved(self, oracle: Oracle) -> None:
        for evidence in self._attributed, self._predicted:
            for key in evidence:
                evidence[key] *= 0.5 ** (1 / 1_000)
        for history in self._histories:
            for half_life in self.half_lives:
                key = history.group, half_life
                count = history.share * history.topic.decayed(oracle.now, half_life)
                expected = count * self._scale(oracle.now, half_life)
                self._predicted[key] = self._predicted.get(key, 0.0) + expected
        if oracle.now - self._published_at >= min(500, self._published_at):
            self._published_at = oracle.now
            self._published = {key: self._weight(*key) for key in self._predicted}

    def _weight(self, group: object, half_life: float) -> float:
        attributed = self._attributed.get((group, half_life), 0.0)
        predicted = self._predicted.get((group, half_life), 0.0)
        return (attributed + 10 / 3) / (predicted + 10)

    @staticmethod
    @cache
    def _scale(retrievals: int, half_life: float) -> float:
        """One over what a path that every retrieval used would count."""
        total: float = sum(0.5 ** (age / half_life) for age in range(retrievals))
        return 1 / total

    def _rates(self, history: History, time: int, *, but_last: bool = False) -> list[float]:
        """At `time`, for the topic as a whole; also, as if its last use hadn't been."""
        return [
            self._published.get((history.group, half_life), 1 / 3)
            * self._scale(self._published_at, half_life)
            * history.topic.decayed(time, half_life, but_last=but_last)
            for half_life in self.half_lives
        ]

    def used(self, history: History, oracle: Oracle) -> None:
        if history in self._histories:
            rates = self._rates(history, oracle.now, but_last=True)
            for half_life, rate in zip(self.half_lives, rates, strict=True):
                key = history.group, half_life
                self._attributed[key] = self._attributed.get(key, 0.0) + rate / sum(rates)
            self._histories.remove(history)
        self._histories.append(history)
        super().used(history, oracle)
        paths = [each for each in self._histories if each.kind == "document"]
        if len(paths) > self.ghosts:
            oracle.forget(paths[0])

    def forgotten(self, history: History) -> None:
        self._histories.remove(history)

    @staticmethod
    def _until(age: int) -> int:
        """The next of 32, 45, 64, 90 and so on."""
        grid = (side * (1 << power) // 128 for power in range(5, 40) for side in (128, 181))
        return next(step for step in grid if step > age)

    def priority(self, node: Node, tier: str, oracle: Oracle) -> float:
        if node.history is None or not node.history.uses:
            return 0.0
        last = node.history.topic.uses[-1]
        until = last + self._until(oracle.now - last)
        value = node.cost * node.history.share * sum(self._rates(node.history, until))
        return value * 0.02 if tier == DEVICE and node.on_host else value

    def foreseen(self, node: Node, tier: str, oracle: Oracle) -> float:
        if node.history is None:
            return 0.0
        value = node.cost * oracle.expected.get(node.history, 0.0)
        return value * 0.02 if tier == DEVICE and node.on_host else value

    def holds_until(self, node: Node, oracle: Oracle) -> float:
        used = node.history is not None and node.history.uses
        last = node.history.topic.uses[-1] if node.history and used else node.last_use
        return last + self._until(oracle.now - last)

    def admits(self, kept: list[Node], displaced: list[Node], oracle: Oracle) -> bool:
        gain, loss = (
            sum(
                node.tokens
                * (self.priority(node, HOST, oracle) + self.foreseen(node, HOST, oracle))
                for node in nodes
            )
            for nodes in (kept, displaced)
        )
        return not displaced or loss < 0.8 * gain
