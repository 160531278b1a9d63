"""Each word of docs/words.md has one meaning: names that gave it another one do not come back."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

# A word, and the names that used it for something else.
OTHER_USES: Final = {
    "member": r"MemberLine|class Member[(:]",
    "table": r"IdTable|IdReader|class Tables\b|TableConfig|TableState",
    "slot": r"SlotsInUse|struct Slot\b",
    "lane": r"class LaneState\b",
    "round": r"RoundSession|ApplySession|ArraysSession",
    "take": r"TakenRound",
    "parameters": r"class (Known|Named|Array)\b[(:]|struct Named\b",
    "difference": r"disagreement|_members_that_differ",
    "close": r"\bdef _finish\b",
    "departed": r"class Departure[(:]",
    "generation": r"_generation\(",
    "give up": r"give_up\(error|segment is given up",
}


@pytest.mark.parametrize("word", OTHER_USES)
def test_a_word_is_not_used_for_something_else(word: str) -> None:
    sources = [
        path for path in (ROOT / "shmacc").rglob("*") if path.suffix in {".py", ".hpp", ".cpp"}
    ]
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = re.search(OTHER_USES[word], line)
            assert not found, f"{path}:{number}: {found}: see docs/words.md on {word!r}"


def test_the_glossary_has_each_of_these_words() -> None:
    glossary = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    for word in OTHER_USES:
        assert re.search(rf"^\| .*\b{word}\b.* \|", glossary, re.MULTILINE), word
