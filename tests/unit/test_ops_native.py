"""The op library's loader refuses what does not fit before loading it (FC 116); what the ops promise TensorFlow."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import gradient_registry

from hvd_ctr.ops import (  # noqa: F401  (they register gradients)
    factorized_ops,
    id_ops,
    interaction_ops,
    mix_cache_ops,
    native,
    plan_ops,
    pooling_ops,
    reader_ops,
    row_life_ops,
    shared_memory_ops,
    stage_ops,
)


def _compile(tmp_path, version):
    """A library that only holds the build marker of another release; loading it would end the process."""
    source = tmp_path / "fake.c"
    source.write_text(
        "#include <stdlib.h>\n"
        f'const char hvd_ctr_build_marker[] = "hvd_ctr_built_for_tensorflow={version}";\n'
        "__attribute__((constructor)) static void never(void) { abort(); }\n"
    )
    library = tmp_path / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_library_of_another_release_is_refused_without_loading_it(tmp_path):
    library = _compile(tmp_path, "2.99.0")
    with pytest.raises(ImportError) as error:
        native.load(library)
    message = str(error.value)
    assert "2.99.0" in message
    assert tf.version.VERSION in message
    assert "rebuild with ./launch/setup.sh" in message
    assert "\n" not in message


def test_environment_variable_names_the_library(tmp_path):
    library = _compile(tmp_path, "1.2.3-rc4")
    code = "from hvd_ctr.ops import native\ntry:\n    native.ops()\nexcept ImportError as e:\n    print(e)"
    environment = {**os.environ, native.LIBRARY_VARIABLE: str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert str(library) in done.stdout
    assert "1.2.3-rc4" in done.stdout


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF without a marker"])
def test_what_is_no_library_is_refused(tmp_path, content):
    path = tmp_path / "lib.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImportError, match=r"lib\.so.*\./launch/setup\.sh"):
        native.load(path)


def test_library_that_does_not_load_is_an_import_error(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"not an ELF file hvd_ctr_built_for_tensorflow=" + tf.version.VERSION.encode() + b"\0")
    with pytest.raises(ImportError, match="cannot be loaded"):
        native.load(path)


def test_built_library_fits():
    assert native.built_for(native.library_path()) == tf.version.VERSION
    assert native.ops() is native.ops()


def test_ops_that_touch_a_cache_or_an_exchange_are_stateful():
    """TensorFlow folds, merges and drops ops that are not, and with them the exchanges that hang on them."""
    names = {"".join(part.capitalize() for part in n.split("_")) for n in dir(native.ops()) if n.startswith("hvd_ctr_")}
    names = {name for name in names if not name.endswith("EagerFallback")}
    stateful = {name.removeprefix("HvdCtr") for name in names if op_def_registry.get(name).is_stateful}
    assert stateful == {
        *("MixCache", "PrepareBatch", "Prefetch", "Lookup", "Read", "CheckRows", "Apply", "Release", "Flush"),
        *(
            "Export",
            "Import",
            "Step",
            "SetStep",
            "Stats",
            "Announce",
            "EndAnnouncements",
            "SetFrequencies",
            "WarmStart",
        ),
        *("RowAges", "Sweep", "ExportWaiting", "ImportLife"),
        # Not the collectives themselves, which then could not overlap: their callers keep TensorFlow from all that.
        *("SharedGroupCreate", "SharedGroupConnect"),
        *("StageClock", "DrainStages"),
    }


DIFFERENTIABLE = {"HvdCtrPoolRows", "HvdCtrDotPairs", "HvdCtrDotPairsGrad", "HvdCtrPairSum", "HvdCtrPairSumGrad"}
DIFFERENTIABLE |= {"HvdCtrPoolRowsGrad", "HvdCtrStageMark"}
# Their gradient is that of the function around them; these say so to who asks for a second one.
DIFFERENTIABLE |= {"HvdCtrFactorizedInput", "HvdCtrFactorizedSum", "HvdCtrFactorizedGrad"}


def test_every_op_has_a_gradient_decision():
    """An op without one raises only when somebody differentiates through it."""
    names = {"".join(part.capitalize() for part in n.split("_")) for n in dir(native.ops()) if n.startswith("hvd_ctr_")}
    for name in sorted(name for name in names if not name.endswith("EagerFallback")):
        gradient = gradient_registry.lookup(name)  # LookupError where none is registered.
        assert (gradient is not None) == (name in DIFFERENTIABLE), name


@pytest.mark.parametrize(
    ("wish", "level", "warning"),
    [("baseline", "baseline", ""), ("AVX512", native.best_simd_level(), "allowed are baseline, avx2, avx512")],
)
def test_environment_variable_forces_the_simd_level(wish, level, warning):
    code = "import logging; logging.basicConfig(format='%(message)s')\n"
    code += "from hvd_ctr.ops import native; print(native.simd_level())"
    environment = {**os.environ, native.SIMD_VARIABLE: wish}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [level]
    assert (f"HVD_CTR_SIMD is '{wish}'" in done.stderr) == bool(warning)
    assert warning in done.stderr


def test_a_level_that_is_not_there_cannot_be_forced():
    with pytest.raises(ValueError, match="received 'avx1024'; this processor has baseline"):
        native.force_simd_level("avx1024")
