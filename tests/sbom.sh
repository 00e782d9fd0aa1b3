#!/usr/bin/env bash
# Bills of materials: what each crate that is published is built of, as CycloneDX 1.5 (JSON), in DIRECTORY. They follow from
# Cargo.lock alone, with all features, for Linux on x86-64. Fails if something in them has no licence or no checksum.
#
#   tests/sbom.sh DIRECTORY
set -euo pipefail

(($# == 1)) || { echo 'sbom.sh: name the directory that it is to write to' >&2 && exit 2; }
mkdir -p "$1"
directory=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo metadata --format-version 1 --locked --all-features --filter-platform x86_64-unknown-linux-gnu |
    python3 -c '
import json, pathlib, re, sys, tomllib, uuid

found, directory = json.load(sys.stdin), pathlib.Path(sys.argv[1])
packages = {package["id"]: package for package in found["packages"]}
nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
locked = tomllib.loads(pathlib.Path("Cargo.lock").read_text())["package"]
checksums = {(one["name"], one["version"]): one.get("checksum") for one in locked}


def purl(identity):
    package = packages[identity]
    return "pkg:cargo/{name}@{version}".format(**package)


def needed(identity, kinds):
    """What it is built of directly: of `None` what it is linked with, of `build` what only builds it."""
    deps = nodes[identity]["deps"]
    return sorted({dep["pkg"] for dep in deps if any(kind["kind"] in kinds for kind in dep["dep_kinds"])})


def reached(root, kinds):
    seen, left = {root}, [root]
    while left:
        fresh = [one for one in needed(left.pop(), kinds) if one not in seen]
        seen.update(fresh)
        left += fresh
    return seen


def component(identity, scope):
    package = packages[identity]
    checksum = checksums[package["name"], package["version"]]
    if not package["license"] or (package["source"] and not checksum):
        sys.exit("{name} {version} has no licence or no checksum".format(**package))
    described = {
        "type": "library",
        "bom-ref": purl(identity),
        "name": package["name"],
        "version": package["version"],
        "scope": scope,
        "licenses": [{"expression": re.sub(" */ *", " OR ", package["license"])}],
        "purl": purl(identity),
    }
    return described | ({"hashes": [{"alg": "SHA-256", "content": checksum}]} if checksum else {})


for root in found["workspace_members"]:
    package = packages[root]
    if package["publish"] == []:
        continue
    linked, built = reached(root, {None}), reached(root, {None, "build"})
    inside = sorted(built - {root}, key=purl)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(root, "required")},
        "components": [component(one, "required" if one in linked else "excluded") for one in inside],
        "dependencies": [
            {"ref": purl(one), "dependsOn": sorted({purl(dep) for dep in needed(one, {None, "build"})})}
            for one in [root, *inside]
        ],
    }
    # Equal bills have equal numbers.
    bill["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill)).urn
    name = "{name}-{version}.cdx.json".format(**package)
    (directory / name).write_text(json.dumps(bill, indent=2) + "\n")
    print(f"{name}: {len(inside)} components, {len(linked) - 1} of them linked")
' "$directory"
