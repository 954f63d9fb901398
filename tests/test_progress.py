"""The global counter: merging in any order and any number of times gives the same sum."""

from hypothesis import given
from hypothesis import strategies as st

from adp2sgd.progress import Count, Progress

Meetings = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=60)


@given(Meetings)
def test_views_never_exceed_the_truth_and_meet_it_after_everybody_met(meetings: list[tuple[int, int, bool]]) -> None:
    views = [Progress(k) for k in range(4)]
    steps = 0
    for i, j, step in meetings:
        if step:
            views[i].advance()
            steps += 1
        views[i].merge(views[j].counts())
        views[j].merge(views[i].counts())
        assert all(view.total <= steps for view in views)
    for _ in range(2):
        for i in range(4):
            for j in range(4):
                views[i].merge(views[j].counts())
    assert [view.total for view in views] == [steps] * 4


def test_a_restart_neither_hides_nor_repeats_steps() -> None:
    other, first = Progress(1), Progress(0, start=0)
    for _ in range(5):
        first.advance()
    other.merge(first.counts())
    again = Progress(0, start=1)
    again.advance()
    other.merge(again.counts())
    other.merge(first.counts())
    assert other.total == 6


def test_nobody_may_report_for_me_and_implausible_counts_are_refused() -> None:
    mine = Progress(0, limit=100)
    mine.advance()
    mine.merge({(0, 0): Count(50), (1, 0): Count(101), (2, 0): Count(100)})
    assert mine.total == 101
    assert mine.refused == 1


def test_restored_counts_hide_nothing_that_was_heard_meanwhile() -> None:
    view = Progress(0, 1)
    view.merge({(1, 0): Count(500)})
    view.restore({(0, 0): Count(100), (0, 1): Count(3), (1, 0): Count(90)})
    assert {key: count.steps for key, count in view.counts().items()} == {(0, 1): 3, (0, 0): 100, (1, 0): 500}
    assert view.total == 603
