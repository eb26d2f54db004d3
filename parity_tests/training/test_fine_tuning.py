"""Training of converted models; the oracle is `transformers`' model with `torch.optim.Adam`."""

import pytest

from parity_tests.support import fine_tuning

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


@pytest.mark.parametrize("name", [pytest.param("M2M100", marks=pytest.mark.slow), "T5 v1.1, Flan-T5"])
def test_the_train_step_is_that_of_torch_on_the_model_of_transformers(name, tmp_path):
    """A step changes a parameter by up to the learning rate, 1e-3."""
    assert fine_tuning.training_difference(name, tmp_path) <= 1e-9
