"""Settings: one place for defaults, files left to right, overrides last, and every mistake named."""

from pathlib import Path

import pytest

from schemas import settings
from schemas.errors import SettingsError
from schemas.settings import Settings, is_secret, load


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[loop]\nbatch_size = 64\nmax_staleness = 5\n")
    (tmp_path / "b.toml").write_text("[loop]\nmax_staleness = 2\n")
    loaded = load([tmp_path / "a.toml", tmp_path / "b.toml"], ["--loop.group_size=8", "--run.name=mine"])
    assert (loaded.loop.batch_size, loaded.loop.max_staleness, loaded.loop.group_size) == (64, 2, 8)
    assert loaded.run.name == "mine"


def test_resolved_settings_load_as_they_were_saved(tmp_path: Path) -> None:
    saved = load([], ["--kafka.client={'security.protocol'='SSL'}"])
    saved.save(tmp_path / "settings.json")
    assert load([tmp_path / "settings.json"]) == saved


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("--loop.batchsize=1", "loop.batchsize"),
        ("--loop.batch_size=0", "loop.batch_size"),
        ("--loop.batch_size=100", "batch_size 100 is not a multiple of loop.group_size 16"),
        ("--curate.capacity=200", "capacity 200 is below twice loop.batch_size 128"),
        ("--dispatch.lease_s=60", "lease_s 60.0 must be above curate.group_timeout_s 60"),
        ("--rollout.tool_timeout_s=60", "tool_timeout_s 60.0 must be below rollout.episode_timeout_s 60"),
        ("--learner.sync_interval_start=30", "sync_interval_start 30 is above sync_interval 20"),
        ("--learner.deepspeed={optimizer={}}", "learner.deepspeed sets ['optimizer']"),
        ("--kafka.client={acks='1'}", "kafka.client sets ['acks']"),
        ("--kafka.client={'sasl.password'='p'}", "an environment variable for each in kafka.secrets"),
        ("--lake.storage_options={aws_secret_access_key='p'}", "set $AWS_SECRET_ACCESS_KEY"),
        ("--weights.storage_options={AZURE_STORAGE_ACCOUNT_KEY='p'}", "set $AZURE_STORAGE_ACCOUNT_KEY"),
        ("--kafka.partitions=3", "kafka.partitions"),
        ("--run.name=../x", "run.name"),
        ("loop", "expected --section.key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(override: str, fault: str) -> None:
    with pytest.raises(SettingsError) as error:
        load([], [override])
    assert fault in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("aws_secret_access_key", "aws_session_token", "aws_sse_customer_key_base64", "token", "bearer_token"),
        *("azure_storage_access_key", "access_key", "account_key", "azure_storage_master_key", "azure_storage_sas_key"),
        *("azure_storage_client_secret", "fabric_session_token", "encryption_key", "google_service_account_key"),
        *("sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem"),
        "sasl.oauthbearer.client.secret",
        *(f"sasl.oauthbearer.assertion.private.key.{part}" for part in ("pem", "passphrase")),
    ],
)
def test_what_a_store_or_librdkafka_keeps_secret_is_saved_in_no_file_and_no_log(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.upper())
    with pytest.raises(SettingsError, match="are secrets"):
        load([], [f"--lake.storage_options={{'{name}'='p'}}"])
    with pytest.raises(SettingsError, match="are secrets"):
        load([], [f"--kafka.client={{'{name}'='p'}}"])


@pytest.mark.parametrize("name", ["tracking.uri", "lake.uri", "lake.claims_uri", "weights.uri", "vllm.url"])
def test_an_address_with_a_password_is_refused_and_the_password_not_told(name: str) -> None:
    with pytest.raises(SettingsError, match="holds a password") as refused:
        load([], [f"--{name}=https://me:hush@host:5000/x"])
    assert "hush" not in str(refused.value)
    assert load([], [f"--{name}=https://me@host:5000/a:b@c"])


@pytest.mark.parametrize(
    "name", ["aws_access_key_id", "aws_sse_kms_key_id", "azure_federated_token_file", "ssl.key.location"]
)
def test_what_names_a_secret_or_its_file_is_none(name: str) -> None:
    assert not is_secret(name)


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml"):
        load([tmp_path / "gone.toml"])
    (tmp_path / "bad.toml").write_text("[loop\n")
    with pytest.raises(SettingsError, match=r"bad\.toml is malformed"):
        load([tmp_path / "bad.toml"])


def test_without_a_run_the_message_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.ENVIRONMENT_FILE, raising=False)
    with pytest.raises(SettingsError, match="lagoon up"):
        settings.current(str(tmp_path))
    Settings().save(tmp_path / "current" / "settings.json")
    assert settings.current(str(tmp_path)) == load([], [f"--run.data_dir={tmp_path}"])


def test_mode_sync_refuses_what_contradicts_it_and_names_each() -> None:
    profile = Path(settings.__file__).parents[2] / "infra" / "profiles" / "sync.toml"
    assert load([profile]).loop.mode == "sync"
    with pytest.raises(SettingsError) as error:
        load(
            [profile], ["--loop.max_staleness=2", "--learner.sync_interval=6", "--evaluator.train_groups_per_family=1"]
        )
    assert "loop.max_staleness = 0 (got 2), learner.sync_interval = 1 (got 6)," in str(error.value)
    assert "evaluator.train_groups_per_family = 0 (got 1)" in str(error.value)
    with pytest.raises(SettingsError, match=r"capacity 2047 is below 16 times loop\.batch_size 128"):
        load([profile], ["--curate.capacity=2047"])


def test_branches_need_a_baseline_of_groups_and_a_wait_that_no_watchdog_takes_for_a_fault() -> None:
    for overrides, message in (
        (["--credit.fork_budget=0.5", "--credit.baseline=value"], "another baseline"),
        (["--credit.fork_budget=0.5", "--credit.fork_wait_s=120"], "must be below learner.watchdog_s"),
    ):
        with pytest.raises(SettingsError, match=message):
            load(overrides=overrides)
    assert load(overrides=["--credit.fork_wait_s=120"]).credit.fork_budget == 0
