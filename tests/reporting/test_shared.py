"""What all prompts begin and end with."""

from array import array
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from batchgen.reporting.shared import Shared


def alike(prompts):
    """Places from the beginning on at which all have the same."""
    return sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, zip(*prompts, strict=False)))


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=6)


@given(PROMPTS, st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4))
def test_it_is_what_all_have_in_common(middles, begin, end):
    prompts = [begin + middle + end for middle in middles]
    shared = Shared()
    shared.add(array("i", one) for one in prompts)
    sent = [one for one in prompts if one]
    if len(sent) < 2:
        assert shared.told() is None
        return
    assert shared.told() == {
        "prefix_tokens": alike(sent),
        "suffix_tokens": alike([one[::-1] for one in sent]),
    }


def test_documents_that_are_not_sent_have_no_prompt():
    shared = Shared()
    shared.add([array("i", [1, 2, 3]), array("i"), array("i", [1, 5, 3])])
    assert shared.told() == {"prefix_tokens": 1, "suffix_tokens": 1}
