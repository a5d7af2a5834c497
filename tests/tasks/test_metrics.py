import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.tasks import metrics

# prediction, gold, exact match, F1 in evaluation, accuracy in evaluation; worked out by hand from the official rules
HARD_CASES = [
    ("Paris", "paris", 1, 1, 1),
    ("The Beatles", "Beatles", 1, 1, 1),
    ("an apple a day", "apple day", 1, 1, 1),
    ("Theodore", "odore", 0, 0, 1),  # "the" is dropped as a word only; accuracy looks at substrings
    ("U.S.A.", "USA", 1, 1, 1),
    ("1,234", "1234", 1, 1, 1),
    ("rock-and-roll", "rock and roll", 0, 0, 0),  # deleted punctuation joins the words
    ("  two \t words\n", "two words", 1, 1, 1),
    ("Beyoncé", "beyonce", 0, 0, 0),  # accents are kept
    ("Beyoncé", "BEYONCÉ", 1, 1, 1),
    ("«Paris»", "Paris", 0, 0, 1),  # only ASCII punctuation is deleted
    ("東京", "東京", 1, 1, 1),
    ("yes", "yes", 1, 1, 1),
    ("Yes.", "yes", 1, 1, 1),
    ("yes", "no", 0, 0, 0),
    ("yes it is", "yes", 0, 0, 0),  # closed answers must match as a whole
    ("no", "no way out", 0, 0, 0),
    ("Norland", "no", 0, 0, 0),
    ("noanswer", "no", 0, 0, 0),
    ("", "", 1, 0, 1),
    ("the", "", 1, 0, 1),
    ("", "Paris", 0, 0, 0),
    ("Paris", "the", 0, 0, 0),  # a gold answer that normalises to nothing is no substring hit
    ("in Paris France", "Paris", 0, 0.5, 1),
    ("Paris", "Paris France", 0, 2 / 3, 0),
    ("a b b c", "b b d", 0, 2 * (2 / 3) * (2 / 3) / (4 / 3), 0),  # multiset overlap 2 of 3 and 3, article dropped
    ("1951 born", "born 1951", 0, 1, 0),
]


@pytest.mark.parametrize(("prediction", "gold", "em", "f1", "accuracy"), HARD_CASES)
def test_hard_cases(prediction, gold, em, f1, accuracy):
    assert metrics.exact_match(prediction, gold) == em
    assert metrics.f1(prediction, gold, closed=True) == pytest.approx(f1)
    assert metrics.accuracy(prediction, gold, closed=True) == accuracy


@pytest.mark.parametrize(
    ("prediction", "gold", "reward"), [("yes it is", "yes", 0.5), ("no", "no way out", 0.5), ("yes", "no", 0.0)]
)
def test_training_f1_has_no_yes_no_rule(prediction, gold, reward):
    assert metrics.f1(prediction, gold) == pytest.approx(reward)


def test_punctuation_to_spaces_is_an_option():
    assert metrics.normalize("rock-and-roll", "space") == "rock and roll"
    assert metrics.exact_match("rock-and-roll", "rock and roll", "space") == 1
    assert metrics.exact_match("U.S.A.", "USA", "space") == 0


@given(st.text(), st.text())
def test_bounds_and_symmetry(left, right):
    value = metrics.f1(left, right)
    assert 0 <= value <= 1
    assert value == pytest.approx(metrics.f1(right, left))
    assert metrics.f1(left, right, closed=True) <= value
    if metrics.exact_match(left, right):
        assert metrics.accuracy(left, right) == 1


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    once = metrics.normalize(text)
    assert metrics.normalize(once) == once
