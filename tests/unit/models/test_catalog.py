import subprocess
import sys

import pytest

from pabench.models import catalog


def test_names_are_unique_and_found():
    names = catalog.model_names()
    assert len(set(names)) == len(names)
    assert {"smollm2-135m", "gemma3-270m", "tiny-llama", "tiny-mqa", "falcon-7b-shape"} <= set(names)
    assert all(catalog.find(name).summary for name in names)
    assert catalog.find("no-such-model") is None


def test_the_catalog_imports_neither_torch_nor_transformers():
    code = "import pabench.models.catalog, sys; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("geometry", catalog.RANDOM_GEOMETRIES, ids=lambda geometry: geometry.name)
def test_random_geometries_pass_transformers_head_rules(geometry):
    assert geometry.hidden_size % geometry.num_q_heads == 0
    assert geometry.num_q_heads % geometry.num_kv_heads == 0
    assert geometry.max_length >= 2048


def test_gemma_names_its_terms():
    assert "ai.google.dev/gemma/terms" in catalog.find("gemma3-270m").license_notice
