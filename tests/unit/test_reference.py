"""The reference page is what the contracts say."""

from pathlib import Path

from schemas import reference


def test_the_reference_page_is_generated_from_the_contracts() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference.md"
    assert page.read_text() == reference.page(), "run `make docs`"
