"""When is a rank silent, or stuck? Pure: what was heard, and when, goes in; a note comes out."""

import re

_EXEMPT = (
    *("attached", "in user code", "waiting", "loading", "compiling"),
    *("saving", "resuming"),
)
"""Actions that may take any time: whoever is waited for has a note of its own."""
_TIMES_USUAL = 10


class RankLiveness:
    """What one rank's beats say. All times are monotonic seconds."""

    def __init__(self, *, silent_s: float, now: float) -> None:
        self.action = "attached"
        self._silent_s = silent_s
        self._age_s = 0.0
        self._heard_at = now
        self._stepped = False
        self._longest_s: dict[str, float] = {}

    def on_beat(self, *, action: str, age_s: float, step: int, now: float) -> None:
        """
        Args:
            age_s: Since when the rank is in `action`.
            step: The last finished step, -1 before the first.
        """
        if action != self.action or age_s < self._age_s:
            shape = _shape(self.action)
            self._longest_s[shape] = max(self._age_s, self._longest_s.get(shape, 0.0))
        self.action, self._age_s, self._heard_at = action, age_s, now
        self._stepped = self._stepped or step >= 0

    def action_age_s(self, now: float) -> float:
        return self._age_s + (now - self._heard_at)

    def note(self, now: float) -> str:
        """Empty, or what is wrong. Changes when the time has doubled, so it can be logged."""
        silence_s = now - self._heard_at
        if silence_s >= self._silent_s:
            return f"silent for {_doubled(silence_s, self._silent_s):g} s in {self._where}"
        # Before the first finished step anything may be compiling or loading.
        if self.action.startswith(_EXEMPT) or not self._stepped:
            return ""
        usual_s = self._longest_s.get(_shape(self.action), 0.0)
        limit_s = max(self._silent_s, _TIMES_USUAL * usual_s)
        age_s = self.action_age_s(now)
        if age_s < limit_s:
            return ""
        return f"no progress for {_doubled(age_s, limit_s):g} s in {self._where}"

    @property
    def _where(self) -> str:
        return self.action.removeprefix("in ")


def _shape(action: str) -> str:
    """The action without its numbers: what its history is kept by."""
    return re.sub(r"\d+", "#", action)


def _doubled(elapsed_s: float, limit_s: float) -> float:
    """The largest limit_s x 2^n that has passed."""
    while limit_s * 2 <= elapsed_s:
        limit_s *= 2
    return round(limit_s, 1)
