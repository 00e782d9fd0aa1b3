"""Settings from Python: sources, precedence, and what a typo is told."""

import os
from pathlib import Path

import pytest

import kvbm_rs
from kvbm_rs import Settings
from kvbm_rs.errors import KvbmError, SettingsError


def test_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert kvbm_rs.version() == kvbm_rs.__version__ == version("kvbm-rs")


def test_nested_and_dotted_values_are_the_same() -> None:
    nested = Settings({"block_bytes": 4096, "host": {"capacity": "64 blocks", "huge_pages": False}})
    dotted = Settings.from_dict({"block_bytes": "4KiB", "host.capacity": "64 blocks", "host.huge_pages": "off"})
    text = Settings.from_toml("block_bytes = 4096\n[host]\ncapacity = '64 blocks'\nhuge_pages = false\n")
    assert nested == dotted == text
    assert nested["host.capacity"] == "64 blocks"
    assert nested != Settings()


def test_lists_paths_and_none() -> None:
    settings = Settings({"disk.dirs": [Path("/a"), "/b"], "disk.capacity": None})
    assert settings["disk.capacity"] == "none"
    assert "/a" in settings["disk.dirs"] and "/b" in settings["disk.dirs"]


def test_a_disk_tier_in_a_directory_that_nobody_named_is_remarked_on(tmp_path: Path) -> None:
    disk = {"block_bytes": 4096, "host.capacity": "1GB", "disk.capacity": "1GB"}
    (remark,) = Settings(disk).remarks()
    assert "the disk tier is in /tmp" in remark and "disk.dirs" in remark
    for named in (str(tmp_path), "/tmp"):
        assert not Settings(disk | {"disk.dirs": named}).remarks()
    assert not Settings({"block_bytes": 4096, "host.capacity": "1GB"}).remarks()


def test_a_replica_keeps_its_files_in_its_own_places(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("disk", "other", "memory", "index")]
    told = {
        "disk": {"capacity": "1GiB", "dirs": places[:2], "keep": True},
        "block_bytes": 4096,
        "host": {"capacity": "1GiB", "persist": places[2], "persist_index": places[3]},
        "metrics.port": 6880,
        "peers": {"enabled": True, "name": "decode", "port": 7000, "address": "10.0.0.1:7000"},
    }
    first, second = Settings(told).of_replica(0), Settings(told).of_replica(1)
    assert first == Settings(told), "a single engine has what it is told"
    assert second != Settings(told).of_replica(2)
    assert all(str(place / "kvbm-dp1") in second["disk.dirs"] for place in places[:2])
    assert second["host.persist"] == str(places[2] / "kvbm-dp1")
    assert second["host.persist_index"] == str(places[3] / "kvbm-dp1")
    assert second["metrics.port"] == "6881"
    assert (second["peers.name"], second["peers.port"], second["peers.address"]) == ("decode-dp1", "7001", "10.0.0.1:7001")
    # What goes with the process does no harm.
    unkept = Settings(told | {"disk": {"capacity": "1GiB", "dirs": places[:2]}})
    assert unkept.of_replica(1)["disk.dirs"] == unkept["disk.dirs"]
    assert Settings({"metrics.port": 0}).of_replica(1)["metrics.port"] == "0"


def test_later_sources_prevail_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "kvbm.toml"
    file.write_text("block_bytes = 4096\n[disk]\nqueue_depth = 3\n")
    settings = Settings(
        {"block_bytes": 16384},
        file=file,
        environment={"DYN_KVBM_BLOCK_BYTES": "8192", "DYN_KVBM_CPU_CACHE_GB": "1", "HOME": "/"},
    )
    assert settings["block_bytes"] == Settings({"block_bytes": 16384})["block_bytes"]
    assert settings.origin("block_bytes") == "argument"
    assert settings.origin("host.capacity") == "DYN_KVBM_CPU_CACHE_GB"
    assert settings.origin("disk.queue_depth") == f"{file}:3"
    assert settings.origin("disk.keep") == "default"
    assert set(settings.to_dict()) > {"block_bytes", "host.capacity", "disk.queue_depth"}


def test_the_environment_counts_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_BLOCK_BYTES", "8192")
    os.environb[b"KVBM_NOT_TEXT"] = b"\xff"
    try:
        assert Settings()["block_bytes"] == "none"
        assert Settings.from_environment().origin("block_bytes") == "DYN_KVBM_BLOCK_BYTES"
        assert Settings.from_environment({"block_bytes": 4096}).origin("block_bytes") == "argument"
    finally:
        del os.environb[b"KVBM_NOT_TEXT"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"host.capcity": "1GiB"}, ["host.capcity", "host.capacity", "host.huge_pages"]),
        ({"hots": {"capacity": "1GiB"}}, ["hots.capacity", "host.capacity"]),
        ({"host": {}}, ["unknown setting host", "host.capacity"]),
        ({"disk.queue_depth": 0.5}, ["disk.queue_depth", "0.5", "from 1 to 4096"]),
        ({"disk": {"queue_depth": [1, 2]}}, ["disk.queue_depth"]),
        ({"block_bytes": True}, ["block_bytes", "true"]),
    ],
)
def test_a_typo_is_a_value_error_that_lists_valid_ones(values: dict[str, object], told: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        Settings(values)
    assert isinstance(raised.value, SettingsError) and isinstance(raised.value, KvbmError)
    for part in told:
        assert part in str(raised.value)


def test_other_sources_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="DYN_KVBM_CPU_CACHE_GBS.*DYN_KVBM_CPU_CACHE_GB"):
        Settings(environment={"DYN_KVBM_CPU_CACHE_GBS": "1"})
    with pytest.raises(SettingsError, match="<text>:2: not valid TOML"):
        Settings.from_toml("a = 1\na = 2\n")
    with pytest.raises(SettingsError, match="cannot read"):
        Settings(file=tmp_path / "nothing")
    with pytest.raises(TypeError, match="not from both"):
        Settings(toml="", file=tmp_path)
    with pytest.raises(TypeError, match=r"host\.capacity: .* not object"):
        Settings({"host": {"capacity": object()}})
    with pytest.raises(KeyError):
        Settings()["nothing"]


def test_secrets_are_never_shown() -> None:
    settings = Settings({"block_bytes": 4096, "object": {"url": "s3://bucket", "access_key": "hunter2", "secret_key": "hunter2"}})
    assert settings["object.secret_key"] == "(set)"
    assert "hunter2" not in repr(settings) + repr(settings.to_dict())
