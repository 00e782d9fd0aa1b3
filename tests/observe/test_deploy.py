"""What docs/deploy has is what Kubernetes, Prometheus, systemd and kvbm itself take."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import documents
from documents import KVBM, ROOT

DEPLOY = ROOT / "docs/deploy"
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


def of_kind(kind: str) -> dict:
    return next(param.values[0] for param in MANIFESTS if param.values[0]["kind"] == kind)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifests_fit_the_schemas_of_kubernetes(manifest):
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(manifest, schemas.latest_version(), strict=True)


def test_the_schemas_see_what_is_wrong():
    schemas = pytest.importorskip("kubernetes_validate")
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": []}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, schemas.latest_version(), strict=True)


def test_what_the_pod_refers_to_is_there():
    spec = of_kind("StatefulSet")["spec"]
    pod, container = spec["template"]["spec"], spec["template"]["spec"]["containers"][0]
    volumes = {one["name"] for one in pod["volumes"]} | {
        one["metadata"]["name"] for one in spec["volumeClaimTemplates"]
    }
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    secret = of_kind("Secret")
    for one in container["env"]:
        if source := one.get("valueFrom"):
            assert source["secretKeyRef"]["name"] == secret["metadata"]["name"]
            assert source["secretKeyRef"]["key"] in secret["stringData"]
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (
        spec["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] == of_kind("StorageClass")["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert tomllib.loads(of_kind("ConfigMap")["data"]["kvbm.toml"])["metrics"]["port"] == ports["kvbm"]


def test_tiers_fit_where_they_lie():
    settings = tomllib.loads(of_kind("ConfigMap")["data"]["kvbm.toml"])
    spec = of_kind("StatefulSet")["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["template"]["spec"]["containers"][0]["volumeMounts"]}
    memory = next(one["emptyDir"] for one in spec["template"]["spec"]["volumes"] if one["name"] == "memory")
    claim = spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert settings["host"]["persist"].startswith(mounts["memory"]) and memory["medium"] == "Memory"
    assert size(settings["host"]["capacity"]) < size(memory["sizeLimit"] + "B")
    assert all(path.startswith(mounts["kv"]) for path in settings["disk"]["dirs"])
    assert size(settings["disk"]["capacity"]) <= 0.9 * size(claim + "B")
    limit = spec["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert size(memory["sizeLimit"] + "B") < size(limit + "B")


def size(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i?)?B", text).groups()
    return int(number) * {None: 1, "G": 10**9, "Gi": 2**30, "T": 10**12, "Ti": 2**40}[unit]


def test_kvbm_takes_the_settings(tmp_path):
    (tmp_path / "kvbm.toml").write_text(of_kind("ConfigMap")["data"]["kvbm.toml"])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_KVBM_")}
    # The engine's to say.
    environment["DYN_KVBM_BLOCK_BYTES"] = "2MiB"
    environment["DYN_KVBM_METRICS_TOKEN"] = of_kind("Secret")["stringData"]["metrics-token"]
    done = subprocess.run(
        [KVBM, "config", "--config", tmp_path / "kvbm.toml"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# What takes root, the network or minutes: what a step of the page does in its place.
STAND_INS = {
    "useradd": "",
    "chown": "",
    "systemctl": "",
    "cargo": "",
    "python3": 'mkdir -p "$3/bin"; ln -s /bin/true "$3/bin/pip"',
    "runuser": 'shift 3; exec "$@"',
}


def below(root: Path, text: str) -> str:
    """With places of the machine in a directory."""
    return re.sub(r"(?<![\w.>])/(?=(?:etc|mnt|opt|usr|dev/shm)\b)", f"{root}/", text)


def checkout(root: Path, place: Path) -> None:
    """What the page takes of a checkout, for a machine whose places are in a directory and whose bucket is memory."""
    for name in ("docs/deploy/kvbm.toml", "docs/deploy/vllm-kvbm.service"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(below(root, (ROOT / name).read_text()).replace("s3://kv-cache/kvbm", "memory:///"))
    (place / "target/release").mkdir(parents=True)
    (place / "target/release/kvbm").symlink_to(KVBM)


def stand_ins(place: Path) -> None:
    place.mkdir()
    for name, does in STAND_INS.items():
        (place / name).write_text(f"#!/bin/sh\n{does}\n")
        (place / name).chmod(0o755)


def test_a_machine_is_set_up_as_it_is_written(tmp_path):
    root, place, programs = tmp_path / "root", tmp_path / "checkout", tmp_path / "programs"
    for directory in ("mnt/nvme1", "etc/systemd/system", "usr/local/bin", "opt", "dev/shm"):
        (root / directory).mkdir(parents=True)
    checkout(root, place)
    stand_ins(programs)
    page = (ROOT / "docs/deploy/README.md").read_text()
    steps = "".join(re.findall(r"```sh by tests/observe/test_deploy.py\n(.*?)```", page, re.DOTALL))
    script = below(root, steps).replace(" -o vllm -g vllm", "")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=place,
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "800GB in" in done.stdout, "doctor tells of the tiers"
    for name in ("metrics-token", "secrets"):
        assert (root / "etc/kvbm" / name).stat().st_mode & 0o777 == 0o600


def test_the_unit_may_write_where_vllm_and_the_tiers_do():
    unit = (DEPLOY / "vllm-kvbm.service").read_text()
    settings = tomllib.loads((DEPLOY / "kvbm.toml").read_text())
    assert "ProtectSystem=strict\n" in unit
    writable = re.search(r"^ReadWritePaths=(.*)", unit, re.MULTILINE)[1].split()
    for place in (*settings["disk"]["dirs"], settings["host"]["persist"]):
        assert place.startswith(tuple(writable)), place
    # Sockets of vLLM lie in the directory for temporary files, what it compiles below the home or the cache.
    assert "PrivateTmp=yes\n" in unit
    cache = "/var/cache/" + re.search(r"^CacheDirectory=(.*)", unit, re.MULTILINE)[1]
    assert f"Environment=HOME={cache} XDG_CACHE_HOME={cache}\n" in unit


def test_users_of_image_and_pod_have_a_writable_home():
    text = (DEPLOY / "Containerfile").read_text()
    home, user = re.search(r"HOME=(\S+)", text)[1], re.search(r"^USER (\d+):(\d+)", text, re.MULTILINE)
    assert f"RUN install -d -o {user[1]} -g {user[2]} {home}\n" in text
    assert of_kind("StatefulSet")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user[1])


def test_variables_exist():
    known = documents.settings()
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not set(re.findall(r"DYN_KVBM_[A-Z_]+", path.read_text())) - known - {"DYN_KVBM_CONFIG"}, path.name


def test_settings_that_are_spoken_of_exist():
    keys = set(re.findall(r"\| `([a-z]+\.[a-z_.]+)` \|", (ROOT / "docs/configuration.md").read_text()))
    sections = "|".join(sorted({key.split(".")[0] for key in keys}))
    for path in [*DEPLOY.rglob("*.md"), ROOT / "docs/runbook.md"]:
        spoken = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b", path.read_text()))
        assert spoken <= keys, (path.name, spoken - keys)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_takes_its_configuration(tmp_path):
    # Debian's Prometheus is built without the discovery of pods: the rest of that job is checked.
    text = (DEPLOY / "prometheus.yml").read_text()
    assert "kubernetes_sd_configs:\n      - role: pod\n" in text
    text = text.replace(
        "kubernetes_sd_configs:\n      - role: pod\n", "static_configs:\n      - targets: ['pod:6880']\n"
    )
    (tmp_path / "kvbm-token").write_text("a token of some length")
    text = text.replace("/etc/prometheus/kvbm-token", str(tmp_path / "kvbm-token"))
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(documents.RULES, tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    # The programs and users that it names are not on every machine.
    text = re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", (DEPLOY / "vllm-kvbm.service").read_text())
    (tmp_path / "vllm-kvbm.service").write_text(re.sub(r"(User|Group)=vllm", r"\1=root", text))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "vllm-kvbm.service"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "vllm-kvbm" not in done.stderr, done.stderr


def test_the_container_file_copies_what_there_is():
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {step for step, _ in steps} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER"}
    stages = {rest.split(" AS ")[1] for step, rest in steps if step == "FROM" and " AS " in rest}
    assert all(name in stages for name in re.findall(r"--from=(\w+)", text))
    wanted = re.search(r"^rust-version = \"([\d.]+)\"", (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    assert f"library/rust:{wanted}-" in text
    for manifest in re.findall(r"--manifest-path (\S+)", text):
        assert (ROOT / manifest).exists()
    tested = re.search(r"vLLM (\d+\.\d+)", (ROOT / "docs/vllm.md").read_text())[1]
    assert f"vllm-openai:v{tested}." in text


def test_links_lead_somewhere():
    for path in [*DEPLOY.rglob("*.md"), ROOT / "docs/runbook.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / link).exists(), (path.name, link)
