"""Who is there, which view that makes, and which stream goes where."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.daemon.routing import Board, Route, View, newer, next_view, routes
from geotrain.transport.messages import PRESENCE_STATES, Presence, view_id

REGIONS = ["a", "b", "c"]

entries = st.builds(
    Presence,
    region=st.sampled_from(REGIONS),
    incarnation=st.integers(0, 4),
    revision=st.integers(0, 4),
    state=st.sampled_from(PRESENCE_STATES),
    note=st.sampled_from(["", "silent", "slow"]),
)
messages = st.lists(st.lists(entries, max_size=3), max_size=4)


def make_board(own: str = "a") -> Board:
    return Board(REGIONS, own)


def entries_of(*states: str, incarnations: tuple[int, ...] = (5, 6, 7)) -> list[Presence]:
    return [
        Presence(region=region, incarnation=incarnation, state=state)
        for region, incarnation, state in zip(REGIONS, incarnations, states, strict=True)
    ]


@pytest.mark.parametrize("num_regions", range(1, 9))
def test_both_ends_of_a_boundary_agree_on_its_streams(num_regions: int) -> None:
    all_routes = [routes(index, num_regions) for index in range(num_regions)]
    sent = {(i, r.peer_index, r.sends) for i, own in enumerate(all_routes) for r in own}
    received = {(r.peer_index, i, r.receives) for i, own in enumerate(all_routes) for r in own}
    assert sent == received
    assert sorted(stream for _, _, stream in sent) == list(range(2 * (num_regions - 1)))


def test_the_middle_of_three_regions_has_two_routes() -> None:
    assert routes(1, 3) == (
        Route(peer_index=0, sends=1, receives=0),
        Route(peer_index=2, sends=2, receives=3),
    )


@given(messages=messages, data=st.data())
def test_merging_gives_the_same_board_in_any_order_and_any_number_of_times(
    messages: list[list[Presence]], data: st.DataObject
) -> None:
    others = [[entry for entry in message if entry.region != "a"] for message in messages]
    board = make_board()
    for message in others:
        board.merge(message)
    shuffled = data.draw(st.permutations(others + others))
    again = make_board()
    for message in shuffled:
        again.merge(message)
    assert again.entries == board.entries
    assert board.merge(again.entries) == []


@given(one=entries, two=entries, three=entries)
def test_newer_is_commutative_associative_and_idempotent(
    one: Presence, two: Presence, three: Presence
) -> None:
    assert newer(one, one) == one
    assert newer(one, two) == newer(two, one)
    assert newer(newer(one, two), three) == newer(one, newer(two, three))


@given(messages=messages)
def test_merge_reports_exactly_what_changed(messages: list[list[Presence]]) -> None:
    board = make_board()
    for message in messages:
        before = {entry.region: entry for entry in board.entries}
        changed = board.merge(message)
        after = {entry.region: entry for entry in board.entries}
        assert {entry.region for entry in changed} == {r for r in after if after[r] != before[r]}
        assert all(after[entry.region] == entry for entry in changed)


@given(messages=messages)
def test_nobody_else_writes_our_entry(messages: list[list[Presence]]) -> None:
    board = make_board("a")
    board.attach({1: 4096}, now_ms=2)
    state = board.update(state="ready", note="x")
    for message in messages:
        board.merge(message)
        assert (board.own.state, board.own.rings) == (state.state, state.rings)
        for entry in message:
            if entry.region == "a":
                assert board.own.rank >= entry.rank


def test_a_region_that_is_not_in_the_run_is_ignored() -> None:
    board = make_board()
    assert board.merge([Presence(region="z", incarnation=9, state="ready")]) == []
    assert [entry.region for entry in board.entries] == REGIONS


@given(
    schedule=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["attach", "ready", "failed", "left", "note", "gossip", "gossip"]),
        ),
        max_size=40,
    )
)
def test_boards_along_a_line_end_equal_whatever_happened_when(
    schedule: list[tuple[int, str]],
) -> None:
    boards = [Board(REGIONS, name) for name in REGIONS]
    for index, action in schedule:
        board = boards[index]
        if action == "gossip":
            for neighbour in (index - 1, index + 1):
                if 0 <= neighbour < 3:
                    boards[neighbour].merge(board.entries)
        elif action == "attach":
            board.attach({}, now_ms=1)
        elif action == "note":
            board.update(note="silent")
        else:
            board.update(state=action)
    for here, there in ((0, 1), (1, 2), (2, 1), (1, 0)):
        boards[there].merge(boards[here].entries)
    assert boards[0].entries == boards[1].entries == boards[2].entries
    assert [board.own for board in boards] == list(boards[0].entries)


def test_every_attach_gets_a_greater_incarnation_even_when_the_clock_went_back() -> None:
    board = Board(REGIONS, "a")
    given = [board.attach({}, now_ms=now_ms).incarnation for now_ms in (2000, 2000, 500)]
    assert given == [2000, 2001, 2002]
    board.merge([Presence(region="a", incarnation=9000, state="ready")])
    assert board.own.incarnation == 9001
    assert board.attach({}, now_ms=3000).incarnation == 9002


def test_an_attach_forgets_the_failure_before_it_and_starts_at_revision_0() -> None:
    board = make_board()
    board.attach({1: 10}, now_ms=1)
    board.update(state="failed", error={"kind": "lost"}, note="x")
    entry = board.attach({1: 20}, now_ms=1)
    assert (entry.state, entry.error, entry.note, entry.revision) == ("attached", None, "", 0)
    assert entry.rings == {1: 20}


@pytest.mark.parametrize("missing", ["absent", "attached", "left", "failed"])
def test_a_view_forms_only_when_all_regions_are_ready(missing: str) -> None:
    for states in set(permutations(["ready", "ready", missing])):
        assert next_view(None, entries_of(*states)) is None
    view = next_view(None, entries_of("ready", "ready", "ready"))
    assert view is not None
    assert view.incarnations == (5, 6, 7)
    assert view.id == view_id((5, 6, 7)) != 0


@given(states=st.tuples(*[st.sampled_from(PRESENCE_STATES)] * 3))
def test_a_view_holds_through_any_states_until_an_incarnation_changes(
    states: tuple[str, ...],
) -> None:
    view = View((5, 6, 7))
    assert next_view(view, entries_of(*states)) == view
    changed = next_view(view, entries_of(*states, incarnations=(5, 8, 7)))
    assert changed == (View((5, 8, 7)) if set(states) == {"ready"} else None)
