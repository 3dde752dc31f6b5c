"""The configuration: defaults, merging, overrides, errors, and the generated reference."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from hvd_ctr import config as c

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def every_model(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        pending = [field.annotation]
        while pending:
            annotation = pending.pop()
            pending += typing.get_args(annotation)
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from every_model(annotation, seen)


ALL_MODELS = [*every_model(c.TrainConfig, set()), c.FeatureConfig, c.TableConfig]


def test_all_models_are_found() -> None:
    assert {c.SynthConfig, c.SparseColumnConfig, c.DenseOptimizerConfig, c.CacheConfig} <= set(ALL_MODELS)


@pytest.mark.parametrize("model", ALL_MODELS)
def test_every_field_is_described_and_unknown_fields_are_refused(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description and field.description.endswith("."), f"{model.__name__}.{name}"
    assert model.model_config.get("extra") == "forbid"
    assert model.model_config.get("frozen") is True


def test_reference_is_current() -> None:
    expected = c.render_reference()
    actual = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert actual == expected, "docs/config.md is out of date: python -m hvd_ctr.config > docs/config.md"


def test_short_forms_and_defaults() -> None:
    item = c.TableConfig("item", dim=8)
    assert (item.name, item.dim, item.rows, item.optimizer.kind) == ("item", 8, None, "adagrad")
    assert item == c.TableConfig(name="item", dim=8) and hash(item) == hash(c.TableConfig(name="item", dim=8))
    feature = c.FeatureConfig("clicked", table=item, length=None)
    assert (feature.combiner, feature.padding_id, feature.weights) == ("sum", None, None)
    with pytest.raises(ValidationError):
        item.dim = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="hash_ids is true but rows is not set"):
        c.TableConfig("item", hash_ids=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{kind: disk, ram_bytes: 1000}", "kind is disk but path is missing"),
        ("{kind: disk, path: /data}", "kind is disk but ram_bytes is missing"),
        ("{kind: ram, path: /data}", "path belongs to kind: disk"),
        ("{kind: ram, ram_bytes: 0}", "embedding.host.ram_bytes: received 0"),
    ],
)
def test_host_tier_that_contradicts_itself_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "run.yaml", f"embedding: {{host: {text}}}\n")
    with pytest.raises(c.ConfigError, match=message):
        c.load_config(path)


def test_saved_configuration_is_complete_and_loads_equal(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "name: saved\n"
        "data: {format: parquet, train: [a.parquet], columns: {dense: [{name: x, default: 1}],\n"
        "       sparse: [{name: user, kind: string}, {name: item, default: 3}, {name: seen}]}}\n"
        "embedding:\n"
        "  optimizer: {kind: ftrl, learning_rate: 1e-3, l1: 0.5}\n"
        "  host: {kind: disk, path: /data/rows, ram_bytes: 3_000_000_000}\n"
        "  shared: {seen: item}\n"
        "  tables: {item: {rows: 100, optimizer: {learning_rate: 0.5}}}\n"
        "synth: {out_dir: data/x}\n",
    )
    config = c.load_config(path)
    c.save_config(config, tmp_path / "saved.yaml")
    again = c.load_config(tmp_path / "saved.yaml")
    assert again == config
    assert again.feature_configs() == config.feature_configs()
    text = (tmp_path / "saved.yaml").read_text()
    assert "shuffle_rows: 262144" in text and "prefetch_wait_seconds: 120.0" in text
    assert str(config.resolved_run_dir()) == "runs/saved"


def test_tables_take_common_settings_unless_they_have_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "embedding: {dim: 4, optimizer: {kind: ftrl, l1: 0.5}, shared: {C2: C1},"
        " tables: {C1: {dim: 8, optimizer: {l2: 0.25}}, C3: {optimizer: {kind: sgd}}}}\n",
    )
    features = c.load_config(path).feature_configs()
    assert [f.name for f in features] == [f"C{i}" for i in range(1, 27)]
    first, second, third, fourth = (f.table for f in features[:4])
    assert first is second and first.name == "C1" and first.dim == 8
    assert (first.optimizer.kind, first.optimizer.l1, first.optimizer.l2) == ("ftrl", 0.5, 0.25)
    assert (third.optimizer.kind, third.dim) == ("sgd", 4)
    assert (fourth.optimizer.kind, fourth.optimizer.l2, fourth.name) == ("ftrl", 0.0, "C4")


def test_base_files_merge_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "grand.yaml", "seed: 5\nmodel: {hidden: [1, 2, 3], dropout: 0.5}\nsynth: {out_dir: data}\n")
    write(tmp_path / "sub" / "base.yaml", "base: ../grand.yaml\nmodel: {name: dlrm}\n")
    path = write(tmp_path / "run.yaml", "base: sub/base.yaml\nmodel: {hidden: [7]}\nsynth: null\n")
    config = c.load_config(path, ["model.dropout=0.25", "train.dense_optimizer.kind=sgd", "name=other"])
    assert config.seed == 5 and config.name == "other" and config.synth is None
    assert (config.model.name, config.model.hidden, config.model.dropout) == ("dlrm", (7,), 0.25)
    assert config.train.dense_optimizer.kind == "sgd"


def test_base_circle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    with pytest.raises(c.ConfigError, match=r"circle: a.yaml -> b.yaml -> a.yaml"):
        c.load_config(tmp_path / "a.yaml")


def test_errors_name_the_file_that_set_the_value(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "train: {global_batch: 0, epochs: 2}\nmodle: {}\n")
    path = write(tmp_path / "run.yaml", "base: base.yaml\nmodel: {name: deepfn}\n")
    with pytest.raises(c.ConfigError) as raised:
        c.load_config(path, ["train.epoch=3"])
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    batch = next(line for line in lines if "global_batch: received" in line)
    assert "base.yaml: train.global_batch: received 0; allowed: greater than or equal to 1" in batch
    unknown = next(line for line in lines if "modle" in line)
    assert "base.yaml: modle: unknown key; did you mean 'model'?" in unknown
    model = next(line for line in lines if "deepfn" in line)
    assert "run.yaml: model.name: received 'deepfn'; allowed: 'deepfm', 'wide_deep', 'dcnv2' or 'dlrm'" in model
    override = next(line for line in lines if "epoch=3" in line)
    assert "--set train.epoch=3: train.epoch: unknown key; did you mean 'epochs'?" in override


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("embedding: {tables: {C1: {dimm: 4}}}", [], "embedding.tables.C1.dimm: unknown key; did you mean 'dim'?"),
        ("embedding: {tables: {dim: {dim: 4}}}", [], "no table is called 'dim'"),
        ("embedding: {shared: {C77: C1}}", [], "no feature is called 'C77'; did you mean 'C7'?"),
        ("embedding: {optimizer: {kind: adma}}", [], "received 'adma'; allowed: 'sgd', 'adagrad'"),
        ("embedding: {hash_ids: true}", [], "hash_ids is true but rows is not set"),
        ("data: {format: parquet}", [], "format is 'parquet' but columns is missing"),
        ("data: {format: parquet, columns: {sparse: [{nam: x}]}}", [], "sparse.0.nam: unknown key; did you mean 'na"),
        ("data: {format: parquet, columns: {sparse: [{name: label}]}}", [], "column(s) label listed more than once"),
        (
            "data: {format: parquet, columns: {sparse: [{name: x, kind: hex, default: 12}]}}",
            [],
            "default: received 12; allowed for kind hex: text of up to 8 hexadecimal digits",
        ),
        ("synth: {scale: 1}", [], "synth.out_dir: missing"),
        ("train: {epochs: 1, epochs: 2}", [], "key 'epochs' is given twice"),
        ("- 1", [], "expected a mapping of keys to values, received list"),
        ("base: [a]", [], "base: received ['a']; allowed: the path of one YAML file"),
        ("base: gone.yaml", [], "gone.yaml: cannot read the configuration (named as base: by"),
        ("train: [", [], "not valid YAML"),
        ("", ["train"], "override 'train': expected key=value"),
        ("", ["=3"], "override '=3': expected key=value"),
        ("", ["seed={"], "override 'seed={': the value is not YAML"),
        ("", ["train.dense_optimizer.learning_rate=.inf"], "received inf; allowed: a finite number"),
        ("data: {train: a.tsv}", [], "data.train: received 'a.tsv'; allowed: a list of text, such as [a.tsv]."),
        ("", ["model.hidden=64"], "model.hidden: received 64; allowed: a list of integers, such as [64]."),
        ("model: {hidden: {a: 1}}", [], "model.hidden: received {'a': 1}; allowed: a list of integers."),
        ("", ["data.train=[1]"], "data.train.0: received 1; allowed: text."),
        ("train: 3", [], "train: received 3; allowed: a section: a mapping of keys to values."),
        ("embedding: {tables: [a]}", [], "embedding.tables: received ['a']; allowed: a mapping of names to values."),
        ("", ["train.epochs=two"], "train.epochs: received 'two'; allowed: an integer."),
        ("", ["train.epochs=1.5"], "train.epochs: received 1.5; allowed: an integer."),
        ("", ["train.epochs=15e-1"], "train.epochs: received '15e-1'; allowed: an integer."),
        ("", ["checkpoint.at_end=perhaps"], "checkpoint.at_end: received 'perhaps'; allowed: true or false."),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    path = write(tmp_path / "run.yaml", text + "\n")
    with pytest.raises(c.ConfigError) as raised:
        c.load_config(path, overrides)
    assert message in str(raised.value)


def test_integers_may_have_an_exponent(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e4 as text; in a field of text it stays what it is."""
    path = write(tmp_path / "run.yaml", "name: 1e4\nembedding: {cache: {slots: 1e4}, rows: 2e+6}\n")
    settings = ["model.hidden=[1e2, 64]", "train.max_steps=1.5e3", "train.epochs=2.0", "data.train=[1e1]"]
    config = c.load_config(path, settings)
    assert (config.embedding.cache.slots, config.embedding.rows) == (10_000, 2_000_000)
    assert (config.model.hidden, config.train.max_steps, config.train.epochs) == ((100, 64), 1500, 2)
    assert config.name == "1e4" and config.data.train == ("1e1",)
    column = c.SparseColumnConfig(name="x", kind="hex", default="1e4")
    assert column.default == "1e4"


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write(tmp_path / "run.yaml", "base: latin.yaml\n")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    with pytest.raises(
        c.ConfigError, match=r"latin.yaml: not UTF-8 text: byte 0xe9 at offset 9 .*save the file as UTF-8"
    ):
        c.load_config(tmp_path / "run.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(c.ConfigError, match=r"none.yaml: cannot read the configuration: No such file"):
        c.load_config(tmp_path / "none.yaml")


def test_yaml_merge_keys_still_work(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "model: &m {dropout: 0.5, l2: 0.1}\nseed: 3\n")
    assert c.load_config(path).model.dropout == 0.5
    path = write(
        tmp_path / "keys.yaml",
        "embedding:\n  tables:\n    C1: &big {dim: 32, rows: 7}\n    C2: {<<: *big, rows: 9}\n",
    )
    tables = [f.table for f in c.load_config(path).feature_configs()[:2]]
    assert [(t.dim, t.rows) for t in tables] == [(32, 7), (32, 9)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_load(path: Path) -> None:
    config = c.load_config(path)
    assert len(config.feature_configs()) == len(config.data.sparse_names())


def test_a_table_may_have_its_own_row_life():
    embedding = c.EmbeddingConfig.model_validate(
        {"min_count": 3, "max_idle_steps": 50, "tables": {"a": {"max_idle_steps": None, "max_rows": 10}, "b": {}}}
    )
    own, common = embedding.table("a"), embedding.table("b")
    assert (own.min_count, own.max_idle_steps, own.max_rows, own.sweep_every_steps) == (3, None, 10, 64)
    assert (common.min_count, common.max_idle_steps, common.max_rows) == (3, 50, None)
    assert own.tracks_rows and common.tracks_rows and not c.TableConfig("plain").tracks_rows


@pytest.mark.parametrize(
    "fields",
    [{"min_count": 0}, {"min_count": 1 << 24}, {"max_idle_steps": 0}, {"max_rows": 0}, {"sweep_every_steps": 0}],
)
def test_row_life_options_out_of_range_are_named(fields):
    for make in (lambda **f: c.TableConfig("t", **f), c.EmbeddingConfig, c.TableOverrideConfig):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            make(**fields)
