"""Models of `transformers` under the audit: each answer that is not as it should be is a mistake of the model's."""

import pytest
import torch
import transformers

from twinax.parity_tests import audit
from twinax.parity_tests.conversion import random_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_t5():
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=12, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    found = audit(transformers.T5ForConditionalGeneration(config), max_length=32)
    assert found.ok, str(found)


@pytest.mark.parametrize("family", ["BART", "Marian", "M2M100"])
def test_models_of_transformers(family):
    found = audit(random_model(family))
    assert found.ok, str(found)
    assert all(answer.ok for answer in found.answers if "loss" not in answer.question), str(found.answers)
