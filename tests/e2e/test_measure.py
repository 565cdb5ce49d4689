"""Local functions measure themselves, and find what was imposed on them."""

from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import ModelProfile, PlatformSpec, StorageReport, from_text, read, write
from funcpipe.platforms.catalog import load_spec, open_storage
from tests.support.waiting import wait_until


def imposed(path: Path) -> PlatformSpec:
    aws = load_spec("aws-lambda")
    spec = replace(aws, sizes=aws.sizes[:1], cold_start_s=0.2, latency_s=0.02)
    write(spec, path)
    return spec


def test_a_platform_that_is_imposed_is_found_by_its_functions(tmp_path: Path) -> None:
    spec = imposed(tmp_path / "spec.json")
    words = ["platforms", "measure", "local", "--like", str(tmp_path / "spec.json"), "-o", str(tmp_path / "found.json")]
    expected = spec.sizes[0]

    def is_found() -> bool:
        """Measure once more; others may take the processors, and make functions slower than what was imposed."""
        assert main(words) == 0
        found = read(PlatformSpec, tmp_path / "found.json")
        size = found.sizes[0]
        assert found.latency_s >= 0.02
        assert found.cold_start_s >= 0.2
        assert size.upload_bytes_s < 1.05 * expected.upload_bytes_s
        assert size.download_bytes_s < 1.05 * expected.download_bytes_s
        assert 100 << 20 < (found.base_memory_bytes or 0) < 600 << 20
        assert found.sources["vcpu"].startswith("measured by functions")
        slowest_bytes_s = min(size.upload_bytes_s, size.download_bytes_s)
        return found.latency_s < 0.2 and found.cold_start_s < 5 and slowest_bytes_s > 0.5 * expected.upload_bytes_s

    wait_until(is_found)


def test_a_model_is_profiled_in_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imposed(tmp_path / "spec.json")
    model = ["tests.e2e.small:model", "--sample", "tests.e2e.small:sample", "--micro-batch", "2"]
    assert main(["profile", *model, "--on", "local", "--like", "spec.json", "--max-usd", "0.01", "-o", "p.json"]) == 0
    found = read(ModelProfile, "p.json")
    assert not found.estimated
    assert found.sizes == ("1024MB",)
    assert all(layer.forward_s[0] > 0 for layer in found.layers)


def test_a_storage_is_measured_from_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = (tmp_path / "objects").as_uri()
    words = ["platforms", "measure", "--storage", url, "--set", "platform.streams=2", "--set", "platform.body-mb=2"]
    assert main([*words, "-o", str(tmp_path / "report.json")]) == 0
    assert "2 streams MB/s" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    report = from_text(StorageReport, capsys.readouterr().out, source="printed")
    kept = read(StorageReport, tmp_path / "report.json")
    assert (report.storage, report.streams) == (kept.storage, kept.streams) == (url, 2)
    assert 0 < report.get.median_s <= report.get.p95_s
    assert open_storage(url).list("") == ()


def test_functions_are_named_before_what_is_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["tests.e2e.small:model", "--sample", "tests.e2e.small:sample"]
    assert main(["profile", *model, "--max-usd", "1"]) == 2
    assert "say where they run: --on local" in capsys.readouterr().err
    assert main(["platforms", "measure", "local"]) == 2
    assert "say where to write the specification" in capsys.readouterr().err
