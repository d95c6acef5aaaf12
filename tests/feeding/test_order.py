"""The order of a window: documents that begin alike meet, the last ones go longest first, and none is lost."""

import dataclasses
import itertools
from array import array

from helpers_config import document
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Prepared
from batchgen.feeding.order import _groups, ordered

FRAME = [7] * 40


def prompts(*ids):
    """Documents with these ids behind the shared frame; None for one that is not sent."""
    return [
        Prepared(document("text", n=n), array("i", [] if one is None else [*FRAME, *one])) for n, one in enumerate(ids)
    ]


def numbers(found):
    return [int.from_bytes(one.document.key, "big") for one in found]


def alike(begin, *more):
    """A prompt that begins as all with this `begin`."""
    return [begin] * 20 + list(more)


def order(window, *, last=False):
    return numbers(ordered(window, last=last))


def test_documents_that_begin_alike_meet_and_the_others_keep_their_order():
    window = prompts([1], alike(2, 1), [3], alike(4, 1), alike(2, 2), [5], alike(4, 2), alike(2, 3), [6])
    assert order(window) == [0, 1, 4, 7, 2, 3, 6, 5, 8]


def test_a_few_tokens_in_common_are_chance_and_move_nothing():
    window = prompts([1, 1, 1, 1, 2], [3], [1, 1, 1, 1, 4], [3, 3], [1, 1, 1, 1, 5])
    assert order(window) == [0, 1, 2, 3, 4]


def test_what_all_have_in_common_groups_nothing():
    window = prompts(*(alike(2, n, *[n] * 20) for n in (9, 5, 7, 5)))
    assert order(window) == [0, 1, 3, 2]
    assert order(prompts(*[alike(2)] * 5)) == [0, 1, 2, 3, 4]


def test_the_last_window_goes_longest_first():
    assert order(prompts(*([n] * n for n in (3, 9, 1, 7, 9))), last=True) == [1, 4, 3, 0, 2]


def test_those_that_begin_alike_stay_together_in_the_last_window():
    window = prompts(alike(2), [3] * 30, alike(2, *[1] * 40), [4] * 25, alike(2, 1))
    assert order(window, last=True) == [2, 4, 0, 1, 3]


def test_documents_that_are_not_sent_neither_hide_what_is_shared_nor_get_lost():
    window = prompts(None, alike(2, 1), [3], None, alike(2, 2))
    assert order(window) == [0, 3, 1, 4, 2]
    assert sorted(order(window, last=True)) == [0, 1, 2, 3, 4]
    assert order(prompts(None, None)) == [0, 1]
    assert order([]) == []


IDS = st.lists(st.integers(0, 2), max_size=30)
WINDOWS = st.lists(st.one_of(st.none(), IDS, st.tuples(st.integers(1, 3), IDS).map(lambda x: alike(x[0], *x[1]))))


@given(WINDOWS, st.booleans())
def test_an_order_is_a_permutation_and_the_same_every_time(ids, last):
    window = prompts(*ids)
    found = ordered(window, last=last)
    assert sorted(numbers(found)) == list(range(len(window)))
    assert ordered(window, last=last) == found


@given(WINDOWS)
def test_only_documents_that_begin_alike_are_moved(ids):
    """Without the later ones of each kind the order is that of the input."""
    window = prompts(*ids)
    shared = 0
    sent = [list(one.prompt_ids) for one in window if one.prompt_ids]
    while sent and all(shared < len(one) and one[shared] == sent[0][shared] for one in sent):
        shared += 1
    begins = [tuple(one.prompt_ids[shared : shared + 16]) for one in window]
    firsts = [n for n, begin in enumerate(begins) if begin not in begins[:n]]
    found = order(window)
    unsent = [n for n, one in enumerate(window) if not one.prompt_ids]
    assert found[: len(unsent)] == unsent
    firsts = [n for n in firsts if n not in unsent]
    assert [n for n in found if n in firsts] == firsts
    for begin in {begins[n] for n in firsts}:
        places = [at for at, n in enumerate(found) if begins[n] == begin and n not in unsent]
        assert places == list(range(places[0], places[0] + len(places)))


@given(WINDOWS)
def test_the_last_window_is_longest_first_within_and_between_those_that_begin_alike(ids):
    window = [one for one in prompts(*ids) if one.prompt_ids]
    kinds = [numbers(group) for group in _groups(window)]
    found = ordered(window, last=True)
    cut = [list(group) for _, group in itertools.groupby(found, lambda one: kind_of(one, kinds))]
    assert len(cut) == len(kinds)
    for group in [[group[0] for group in cut], *cut]:
        lengths = [len(one.prompt_ids) for one in group]
        assert lengths == sorted(lengths, reverse=True)


def kind_of(one, kinds):
    return next(n for n, kind in enumerate(kinds) if numbers([one])[0] in kind)


def test_documents_in_pieces_stand_apart_and_weigh_all_their_pieces():
    """All of them begin alike: as a group they would go before everything that stands between them."""
    window = prompts(alike(2), [3] * 60, alike(2), [4], alike(2))
    for n in (0, 2, 4):
        window[n] = dataclasses.replace(window[n], pieces=(window[n].prompt_ids,) * (n + 1))
    assert order(window) == [0, 1, 2, 3, 4]
    assert order(window, last=True) == [4, 2, 1, 0, 3]
