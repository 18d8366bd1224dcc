"""Claim checks: what an object must be before it is believed, and what a claim may name."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import claims as module
from infra.claims import Claims
from schemas.claims import MAX_CLAIM_BYTES, Claim, claim_in, claimed_bytes
from schemas.errors import ContractError, LakeError
from schemas.names import Header
from tests.samples import group, message

BODY = b"an Arrow stream"


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return Claims(str(tmp_path / "claims"), waits_s=(0.0,))


def fetch(claims: Claims, claim: Claim) -> bytes:
    return claims.body(claim.header, claim.to_bytes())


def test_a_body_comes_back_by_its_claim_and_a_message_that_is_none_carries_its_own(claims: Claims) -> None:
    assert fetch(claims, claims.put(BODY)) == BODY
    assert claims.body({}, b"anything") == b"anything"


def test_an_object_that_is_there_is_not_written_twice(claims: Claims) -> None:
    claim = claims.put(BODY)
    path = Path(claims.uri, claim.sha256)
    before = path.stat().st_mtime_ns
    assert claims.put(BODY) == claim
    assert path.stat().st_mtime_ns == before


def test_an_object_cut_short_is_written_again(claims: Claims) -> None:
    claim = claims.put(BODY)
    Path(claims.uri, claim.sha256).write_bytes(BODY[:3])
    claims.put(BODY)
    assert fetch(claims, claim) == BODY


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is missing"),
        (b"", "has 0 bytes, expected 15"),
        (BODY + b"!", "has 16 bytes, expected 15"),
        (BODY[::-1], "its SHA-256 differs"),
    ],
)
def test_a_missing_or_wrong_object_is_a_fault_of_the_record(claims: Claims, content: bytes | None, why: str) -> None:
    claim = claims.put(BODY)
    path = Path(claims.uri, claim.sha256)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=why):
        fetch(claims, claim)


def test_a_folder_in_the_place_of_an_object_is_a_missing_object(claims: Claims) -> None:
    Path(claims.uri, Claim.of(BODY).sha256).mkdir(parents=True)
    with pytest.raises(ContractError, match="is missing"):
        fetch(claims, Claim.of(BODY))


def test_an_object_that_shows_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = Claims(str(tmp_path / "claims"), waits_s=(1, 2, 3))
    shows = SimpleNamespace(sleep=lambda wait_s: wait_s == 2 and claims.put(BODY))
    monkeypatch.setattr(module, "time", shows)
    assert fetch(claims, Claim.of(BODY)) == BODY


def test_where_everything_is_missing_nothing_is_waited_for(
    tmp_path: Path, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append))
    for number in range(20):
        with pytest.raises(ContractError):
            fetch(claims, Claim.of(bytes([number])))
    assert len(waits) == 8 * 2 + 12  # eight were looked for twice, the others once


def test_a_store_that_is_away_is_no_fault_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    claims = Claims(str(tmp_path / "file" / "claims"), waits_s=())
    with pytest.raises(LakeError, match="takes no objects"):
        claims.put(BODY)
    with pytest.raises(LakeError, match="does not answer"):
        fetch(claims, Claim.of(BODY))


@pytest.mark.parametrize(
    "body",
    [
        b'{"sha256": "../../etc/passwd", "num_bytes": 15}',
        b'{"sha256": "%s", "num_bytes": 15}' % (b"A" * 64),
        b'{"sha256": "%s/", "num_bytes": 15}' % (b"a" * 63),
        b'{"sha256": "%s\\n", "num_bytes": 15}' % (b"a" * 64),
        b'{"sha256": "%s", "num_bytes": 0}' % (b"a" * 64),
        b'{"sha256": "%s", "num_bytes": %d}' % (b"a" * 64, MAX_CLAIM_BYTES + 1),
        b'{"sha256": "%s", "num_bytes": 15, "url": "s3://other"}' % (b"a" * 64),
        b'{"sha256": "%s", "num_bytes": 16}' % (b"a" * 64),  # the header says 15
        b"",
        b"[]",
    ],
)
def test_a_claim_names_a_hash_and_a_size_within_bounds_and_nothing_else(claims: Claims, body: bytes) -> None:
    with pytest.raises(ContractError):
        claims.body({Header.CLAIM: b"15"}, body)
    assert not Path(claims.uri).exists()  # refused before anything was opened


@given(st.binary(min_size=1, max_size=1000))
def test_what_is_claimed_is_the_claim(body: bytes) -> None:
    claim = Claim.of(body)
    assert claim_in(claim.header, claim.to_bytes()) == claim
    assert claimed_bytes(tuple(claim.header.items())) == len(body)


@given(st.binary(max_size=30))
def test_no_header_makes_a_message_count_for_more_than_an_object_may_hold(value: bytes) -> None:
    assert 0 <= claimed_bytes([(Header.CLAIM, value)]) <= MAX_CLAIM_BYTES


def test_a_message_counts_with_its_key_and_headers_and_what_it_claims() -> None:
    raw = dataclasses.replace(message(group("a", [1.0]), 0), key=b"12345", headers=(("h", b"123"), ("h", b"45")))
    assert raw.num_bytes == len(raw.value) + 5 + 4 + 3
    claim = dataclasses.replace(raw, key=None, headers=((Header.CLAIM, b"1000"),))
    assert claim.num_bytes == len(raw.value) + len("lagoon-claim") + 4 + 1000


def test_a_message_with_two_claims_counts_with_the_one_that_is_read() -> None:
    claim = Claim.of(BODY)
    headers = ((Header.CLAIM, b"1"), *claim.header.items())
    assert claim_in(dict(headers), claim.to_bytes()) == claim
    assert claimed_bytes(headers) == len(BODY)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_object_that_may_not_be_read_is_a_fault_of_the_record(claims: Claims) -> None:
    claim = claims.put(BODY)
    Path(claims.uri, claim.sha256).chmod(0)
    with pytest.raises(ContractError, match="may not be read"):
        fetch(claims, claim)
