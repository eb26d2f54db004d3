"""Audits of models of `transformers`: each failure is explained, and disappears when its cause is removed."""

import inspect
import sys
import textwrap

import pytest
import torch
import transformers
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts
from transformers.models.prophetnet.modeling_prophetnet import ProphetNetNgramSelfAttention

from parity_tests.support.conversion import random_model
from parity_tests.support.transformers_audit import EXPLAINED, complaints, small_model
from twinax.audit import audit, hugging_face
from twinax.audit.audit_report import Answer, Audit

pytestmark = pytest.mark.filterwarnings("ignore")


def test_t5():
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=12, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    report = audit(transformers.T5ForConditionalGeneration(config), max_length=32)
    assert report.ok, str(report)


@pytest.mark.parametrize("family", ["BART", "Marian, two vocabularies"])
def test_models_of_transformers(family):
    report = audit(random_model(family))
    assert report.ok, str(report)
    assert all(answer.ok for answer in report.answers if "loss" not in answer.question), str(report.answers)


def test_sizes_of_a_config():
    marian = hugging_face.sizes(random_model("Marian, two vocabularies"))
    assert marian == ((31, 29), 28, (0, 28), 13)
    assert hugging_face.sizes(torch.nn.Linear(3, 3)) is None


def with_source(monkeypatch, owner, method, replacements):
    """Patches the source text of a method of `transformers`."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    for old, new in replacements.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[owner.__module__]))
    exec(source, namespace)
    monkeypatch.setattr(owner, method, namespace[method])


def check_cause(architecture, without_cause):
    """Asserts that the model fails only explained questions, and that `without_cause` returns a passing audit."""
    model = small_model(architecture)
    report = audit(model)
    assert list(complaints(report)) == []
    assert not report.ok
    healthy_report = without_cause(model)
    assert healthy_report.ok, str(healthy_report)


def test_prophetnet_is_judged_in_float32_and_its_bias_order_explains_all_it_fails(monkeypatch):
    def audit_repaired(model):
        method = "get_predict_relative_pos_embeddings"
        replacements = {"permute(0, 2, 1, 4, 3)": "permute(0, 1, 4, 2, 3)"}
        with_source(monkeypatch, ProphetNetNgramSelfAttention, method, replacements)
        report = audit(model)
        line = "audited in float32: the outputs are not finite in float64, first in prophetnet.encoder"
        assert report.dtype_line == line
        return report

    check_cause(transformers.ProphetNetForConditionalGeneration, audit_repaired)


def test_led_uses_its_global_projections_where_a_token_attends_globally(monkeypatch):
    def forward(model, src, tgt):
        inputs = {"attention_mask": (src != 0).long(), "decoder_input_ids": tgt, "use_cache": False}
        return model(
            src, global_attention_mask=(torch.arange(src.shape[1]) == 0).long().expand_as(src), **inputs
        ).logits

    def audit_repaired(model):
        monkeypatch.setattr(torch, "rand", torch.ones)  # which LayerDrop compares with its rate
        return audit(model, forward=forward)

    check_cause(transformers.LEDForConditionalGeneration, audit_repaired)


@pytest.mark.slow
def test_nllb_moe_uses_all_experts_where_their_numbers_are_read(monkeypatch):
    def audit_repaired(model):
        replacements = {
            "torch.nn.functional.one_hot(router_mask, num_classes=self.num_experts).permute(2, 1, 0)": (
                "(router_probs > 0).T[:, None]"
            ),
            "router_probs[top_x, idx, None]": "router_probs[top_x, expert_idx, None]",
        }
        with_source(monkeypatch, NllbMoeExperts, "forward", replacements)
        return audit(model)

    check_cause(transformers.NllbMoeForConditionalGeneration, audit_repaired)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}),
        ("SwitchTransformersForConditionalGeneration", {"expert_capacity": 64}),
    ],
)
def test_a_setting_removes_the_cause(name, settings):
    architecture = getattr(transformers, name)
    check_cause(architecture, lambda model: audit(small_model(architecture, **settings)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("EncoderDecoderModel", ("pooler",)),
        ("T5Gemma2ForConditionalGeneration", ("vision_tower", "multi_modal_projector", "eoi_embedding")),
    ],
)
def test_all_parameters_without_a_gradient_belong_to_the_named_part(name, unused):
    def audit_frozen(model):
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in path for part in unused))
        return audit(model)

    check_cause(getattr(transformers, name), audit_frozen)


def test_an_unexplained_answer_and_a_stale_explanation_are_complaints():
    name, question = "EncoderDecoderModel", "Does every parameter receive a gradient?"
    explained_answer = Answer(False, EXPLAINED[name, question].measured + ".weight", question=question)
    assert list(complaints(Audit(name, (explained_answer,)))) == []
    assert list(complaints(Audit(name, ()))) == [f"{name}: {question} Yes. Remove it from EXPLAINED"]
    unexplained_answer = Answer(False, "9 of 9 tensors", question=question)
    assert list(complaints(Audit(name, (unexplained_answer,)))) == [
        f"{name}: {question} No: 9 of 9 tensors. It is not in EXPLAINED"
    ]
    assert len(list(complaints(Audit("Other", (explained_answer,))))) == 1
