"""The ranks that act in step. One rank alone is a group of one, and runs the same code."""

from geotrain.pipeline.schedule import Action


class Group:
    """Ranks that share collectives: the leader decides each action, the members run it.

    Ranks of such a group that decided alone would enter their collectives in different orders and
    hang, or go silently wrong.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        assert size == 1 and rank == 0, "attach() refuses more than one rank in a region"
        self.is_leader = True

    def agree(self, action: Action | None) -> Action | None:
        """What the whole group runs next: the leader's choice."""
        return action
