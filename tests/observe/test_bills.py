"""Bills of materials are what CycloneDX says that they are."""

import subprocess

import pytest

from documents import ROOT


@pytest.fixture(scope="module")
def bills(tmp_path_factory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("bills")
    subprocess.run([ROOT / "tests/sbom.sh", place], check=True, capture_output=True)
    return {path.name: path.read_text() for path in place.iterdir()}


@pytest.fixture(scope="module")
def schema():
    pytest.importorskip("jsonschema")
    validation = pytest.importorskip("cyclonedx.validation.json")
    from cyclonedx.schema import SchemaVersion

    return validation.JsonStrictValidator(SchemaVersion.V1_5)


def test_bills_fit_the_schema_of_cyclonedx(bills, schema):
    assert len(bills) == 5
    for name, bill in bills.items():
        assert schema.validate_str(bill) is None, name


def test_the_schema_sees_what_is_wrong(bills, schema):
    bill = next(iter(bills.values()))
    for right, wrong in {'"SHA-256"': '"SHA-X"', '"required"': '"perhaps"', '"expression"': '"words"'}.items():
        assert schema.validate_str(bill.replace(right, wrong)) is not None, wrong
