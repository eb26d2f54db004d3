"""The page of a ladder: the numbers of the ladder, the weights in its images, and nothing from elsewhere."""

import base64
import io
import re
from dataclasses import replace
from math import ceil, inf, log10, nan

import jax
import numpy as np
import pytest
import torch
from PIL import Image

from parity_tests.compare.test_comparison_page import Reader as PageReader
from twinax import TransformerConfig, convert, torch_reference
from twinax.parity import ladder as ladder_module
from twinax.parity.attention import LONGEST, attention_in
from twinax.parity.functions import Batch, random_arrays
from twinax.parity.harness import Criterion, Finding, Report, compare_arrays
from twinax.parity.heat_map import blocks, levels, outside_layers
from twinax.parity.ladder import CRITERIA, run_ladder, rung_of
from twinax.parity.page import page
from twinax.parity.report import as_document, caption

CONFIG = TransformerConfig.preset("tiny", num_encoder_layers=2, num_decoder_layers=1, d_model=16, d_ff=24)
ARRAYS = random_arrays(CONFIG, 0)
WRONG = "decoder.layers.0.cross_attention.k_proj.kernel"
PERTURBED = ARRAYS | {WRONG: ARRAYS[WRONG] * np.float32(1.001)}
COMMAND = "twinax parity a.pt b.pt --seed 0"
NAMES = ("a.pt", "b.pt")


@pytest.fixture(scope="module")
def ladders():
    """(an equal ladder, one that differs), in float64 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "_ratios", lambda *arguments: {})
        equal = run_ladder(CONFIG, arrays=ARRAYS, reproduce=COMMAND)
        different = run_ladder(CONFIG, arrays=ARRAYS, flax=(CONFIG, PERTURBED), reproduce=COMMAND)
    return equal, different


@pytest.fixture(scope="module")
def equal(ladders):
    return ladders[0]


@pytest.fixture(scope="module")
def different(ladders):
    return ladders[1]


class Reader(PageReader):
    """Also the rows of tables, with the classes and titles of cells, and the images by their labels."""

    def __init__(self, text):
        self.tables, self.images, self._label = [], {}, ""
        super().__init__(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "table":
            self.tables.append((values["class"], []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th", "caption"):
            cell = {"text": "", **values}
            self.tables[-1][1].append([cell]) if tag == "caption" else self.tables[-1][1][-1].append(cell)
            self._cell = cell
        elif tag == "summary":
            self._summary = ""
        elif tag == "svg":
            self._label = values.get("aria-label", "")
        elif tag == "image":
            title = self._summary.partition(" largest")[0].strip()
            self.images[title, self._label] = values["href"]
        if tag == "img":
            self.tags.append(tag)
            self.attributes += attributes
        else:
            super().handle_starttag(tag, attributes)

    def handle_data(self, data):
        super().handle_data(data)
        tags = [tag for tag, _ in self.open]
        if "td" in tags or "th" in tags or "caption" in tags:
            self._cell["text"] += data
        if "summary" in tags:
            self._summary += data


def rows_of(text, kind):
    return [rows for name, rows in Reader(text).tables if name == kind]


def pixels(uri):
    """The numbers of colors in an image, and the opacities of its palette."""
    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    image = Image.open(io.BytesIO(content))
    return np.asarray(image), np.frombuffer(image.info["transparency"], np.uint8)


def test_the_page_needs_no_network_and_no_script(different):
    hostile = "<script>alert(1)</script>"
    text = page(different, (hostile, 'b"'), assumed=(hostile,), labels=([hostile] * 10, ["</svg>"] * 6))
    reader = Reader(text)
    assert "script" not in reader.tags
    assert "&lt;script&gt;" in text
    assert not {"style", "onclick", "onload"} & {name for name, _ in reader.attributes}
    (policy,) = (value for _, value in reader.attributes if value and value.startswith("default-src"))
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]+'; img-src data:; base-uri 'none'; form-action 'none'", policy
    )
    addresses = [value for name, value in reader.attributes if name in ("href", "src")]
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#labels-")) for address in addresses)
    assert "://" not in text.replace(hostile, "")


def test_the_verdict_comes_first(ladders):
    for ladder, word in zip(ladders, ("equal", "DIFFERENT"), strict=True):
        heading = re.search(r"<h1[^>]*><span[^>]*>.</span> (.*?)</h1>", page(ladder, NAMES, assumed=("num_heads=3",)))
        assert heading[1] == word + ", assuming num_heads=3" * (word == "equal")
    count = len(different := ladders[1].report.failures)
    assert f"{count} of {len(ladders[1].report.findings)} arrays differ, first {different[0].path}." in page(
        ladders[1], NAMES
    )


def test_every_rung_has_the_numbers_of_the_document(ladders):
    for ladder in (
        *ladders,
        replace(ladders[0], rungs=tuple(replace(r, float32_ratio=1.234) for r in ladders[0].rungs)),
    ):
        ((_, *rows),) = rows_of(page(ladder, NAMES), "ladder")
        document = as_document(ladder)["rungs"]
        assert len(rows) == len(document) == 7
        for row, rung in zip(rows, document, strict=True):
            name, error, float32, bfloat16, verdict = (cell["text"] for cell in row)
            assert name == rung["name"]
            assert float(error) == pytest.approx(rung["error"], rel=0.06)
            assert float32 == ("–" if rung["float32_ratio"] is None else "1.23")
            assert bfloat16 == "–"
            assert verdict == ("equal" if rung["ok"] else "DIFFERENT")
        texts = Reader(page(ladder, NAMES)).texts
        assert " ".join(caption(ladder, "").split()) in texts["ladder"]
        assert all(
            f"{criterion.rung} " in texts["ladder"] and criterion.reason in texts["ladder"] for criterion in CRITERIA
        )


def expected_level(finding):
    if finding.error == 0:
        return 0
    decades = log10(finding.error / finding.tolerance) if finding.tolerance and finding.error < inf else inf
    return max(ceil(decades) + 6, 0) if decades <= 0 else 12 if decades > 10 else 6 + ceil(decades / 2)


def test_the_cells_of_the_heat_map_are_the_findings(ladders):
    for ladder in ladders:
        findings = {finding.path: finding for finding in ladder.report.findings}
        places = []
        for (stack,), columns, *rows in rows_of(page(ladder, NAMES), "heat"):
            for row in rows:
                if row[0]["scope"] == "rowgroup":
                    rung = row[0]["text"]
                    continue
                for column, cell in zip(columns[1:], row[1:], strict=True):
                    place = row[0]["text"]
                    if stack["text"] in ("encoder", "decoder"):
                        prefix = "gradients." * (rung == "gradients")
                        place = f"{prefix}{stack['text']}.layers.{column['text']}.{place}"
                        assert rung == findings[place].rung
                    places.append(place)
                    finding = findings[place]
                    number, status, tolerance = cell["text"].split()
                    assert float(number) == pytest.approx(finding.error, rel=0.5)
                    assert status == ("within" if finding.ok else "exceeds")
                    assert float(tolerance) == pytest.approx(finding.tolerance, rel=0.005)
                    assert cell["class"] == f"level-{expected_level(finding)}", finding
                    assert cell["title"].startswith(f"{place}: error {finding.error:.3g}, ")
        assert sorted(places) == sorted(findings)


def test_arrays_that_differ_are_listed_in_order(different):
    ((_, *rows),) = rows_of(page(different, NAMES), "differing")
    failures = different.report.failures
    assert len(failures) > len(rows) == 20
    for row, finding in zip(rows, failures, strict=False):
        path, index, reference, candidate, error, tolerance = (cell["text"] for cell in row)
        assert (path, index) == (finding.path, ", ".join(map(str, finding.index)))
        numbers = [float(text) for text in (reference, candidate, error, tolerance)]
        expected = [finding.reference, finding.candidate, finding.error, finding.tolerance]
        assert numbers == pytest.approx(expected, rel=0.005)
    texts = Reader(page(different, NAMES)).texts
    assert f"… and {len(failures) - 20} more." in texts["differences"]
    assert WRONG.removesuffix(".kernel") in texts["lines"]
    assert COMMAND in texts["repeat"]


def test_the_environment_is_named(equal):
    texts = Reader(page(equal, NAMES)).texts
    assert f"jax {jax.__version__}" in texts["environment"]
    assert f"torch {torch.__version__.partition('+')[0]}" in texts["environment"]  # of a build for CUDA
    assert "differences" not in texts
    assert "lines" not in texts


def weights_of(arrays, batch):
    """Path of an attention -> its weights (B, N, T, S), by a call of the PyTorch twin."""
    config = CONFIG.replace(param_dtype="float64", compute_dtype="float64")
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    model = torch_reference.Transformer.from_state_dict(config, convert.to_state_dict(wide, config)).eval()
    tokens = torch.from_numpy(batch.src_tokens), torch.from_numpy(batch.tgt_tokens)
    outputs = torch_reference.activations(model, *tokens)[1]
    return {
        path.removesuffix(".weights"): a.detach().numpy() for path, a in outputs.items() if path.endswith(".weights")
    }


def test_the_images_are_the_weights_of_both_models(ladders):
    for ladder, arrays in zip(ladders, (ARRAYS, PERTURBED), strict=True):
        batch = ladder_module._draw(CONFIG, 0, 0, 4, 11, 7)
        batch.src_tokens[-1] = CONFIG.pad_id
        failure = next((f for f in ladder.report.failures if f.path.endswith(".weights")), None)
        row = failure.index[0] if failure else 0
        assert ladder.attention.sentence == row
        pytorch, flax = (weights_of(side, batch) for side in (ARRAYS, arrays))
        images = Reader(page(ladder, NAMES)).images
        assert len(images) == 6 * len(pytorch) == 24
        for path in pytorch:
            one, other = (side[path][row] for side in (pytorch, flax))
            stack, _, layer, module = path.split(".")
            title = f"{stack} layer {layer}, {module.replace('_', '-')}"
            head = next(entry.head for entry in ladder.attention.maps if entry.path == path)
            if failure is not None and path.startswith("decoder") and module == "cross_attention":
                assert head == np.abs(one - other).max((1, 2)).argmax()
            for part, choose in (
                ("mean of 3 heads", lambda a: a.mean(0)),
                (f"head {head}", lambda a, head=head: a[head]),
            ):
                for name, weights in (("PyTorch", one), ("Flax", other)):
                    numbers, opacities = pixels(images[title, f"{name}, {part}"])
                    shown = choose(weights)[: numbers.shape[0], : numbers.shape[1]]
                    assert np.abs(numbers / 255 - shown).max() <= 0.5 / 255 + 1e-9
                    assert np.all(np.diff(opacities.astype(int)) >= 0)
                if failure is not None and path == "decoder.layers.0.cross_attention":
                    numbers, _ = pixels(images[title, f"difference, {part}"])
                    errors = np.abs(choose(one) - choose(other))[: numbers.shape[0], : numbers.shape[1]]
                    expected = [expected_level(Finding("", "", error=e, tolerance=1e-12)) for e in errors.ravel()]
                    assert numbers.ravel().tolist() == expected
                    assert numbers.max() > 8


def test_tokens_are_labels(equal):
    src, tgt = (len(ids) for ids in equal.attention.tokens)
    text = page(
        equal, NAMES, labels=([f"▁word{i}" for i in range(src)], [f"an-extraordinarily-long-{i}" for i in range(tgt)])
    )
    attention = Reader(text).texts["attention"]
    assert all(f"▁word{i} " in attention for i in range(src))
    assert "an-extraordinarily-long-3" in attention
    assert text.count(">an-extra…<") == 3 * tgt  # on both axes of the decoder's own, on one of the other
    assert "positions" not in attention
    assert "The labels are positions." in Reader(page(equal, NAMES)).texts["attention"]


def test_what_is_open(ladders):
    equal, different = (
        re.findall(r"<details( open)?>\n<summary>(.*?) <span>", page(ladder, NAMES)) for ladder in ladders
    )
    assert [title for is_open, title in equal if is_open] == [
        "encoder layer 1, self-attention",
        "decoder layer 0, self-attention",
        "decoder layer 0, cross-attention",
    ]
    assert [title for is_open, title in different if is_open] == ["decoder layer 0, cross-attention"]


def attention_of(batch, change=lambda path, weights: weights):
    sizes = {"encoder.layers.0.self_attention": 0, "decoder.layers.0.self_attention": 1}
    sides = batch.src_tokens.shape[1], batch.tgt_tokens.shape[1]
    pytorch = {
        f"{path}.weights": np.random.default_rng(0).random((len(batch.labels), 2, sides[side], sides[side]))
        for path, side in sizes.items()
    }
    flax = {path: change(path, weights.copy()) for path, weights in pytorch.items()}
    report = compare_arrays(pytorch, flax, criteria=CRITERIA, rung_of=rung_of)
    return attention_in(pytorch, flax, batch, 0, report)


def test_long_sentences_are_cut_and_padding_is_left_out():
    src, tgt = np.ones((3, 40), int), np.ones((3, 9), int)
    tgt[:, 5:] = 0
    batch = Batch(src, tgt, tgt)
    attention = attention_of(batch)
    assert (attention.sentence, attention.lengths) == (0, (40, 5))
    assert [len(ids) for ids in attention.tokens] == [LONGEST, 5]
    assert [entry.pytorch.shape for entry in attention.maps] == [(2, 32, 32), (2, 5, 5)]
    empty = attention_of(Batch(src * 0, tgt * 0, tgt))
    assert [len(ids) for ids in empty.tokens] == [1, 1]


def test_a_difference_in_padding_is_shown_and_other_shapes_are_not():
    tgt = np.ones((3, 9), int)
    tgt[:, 5:] = 0

    def change(path, weights):
        if path.startswith("encoder"):
            return weights[:, :1]
        weights[2, 1, 3, 6] += 1e-3
        return weights

    attention = attention_of(Batch(np.ones((3, 4), int), tgt, tgt), change)
    (entry,) = attention.maps
    assert (entry.path, entry.head, entry.error) == ("decoder.layers.0.self_attention", 1, pytest.approx(1e-3))
    assert (attention.sentence, len(attention.tokens[1])) == (2, 7)


def test_the_heat_map_of_24_layers():
    def finding(path, error=1e-15, **values):
        return Finding(path, rung_of(path), error=error, tolerance=1e-12, **values)

    findings = [finding(f"encoder.layers.{i}.feed_forward.output") for i in range(24)]
    findings += [
        finding("encoder.layers.3.self_attention.weights", inf, problem="shapes differ: <b>"),
        finding("loss", nan),
    ]
    report = Report(tuple(findings), CRITERIA)
    first, second = blocks(report)
    assert (first.layers, second.layers) == (tuple(range(12)), tuple(range(12, 24)))
    (row,) = first.rows["attention weights"]
    assert [f is not None for f in row.findings] == [i == 3 for i in range(12)]
    assert [f.path for f in second.rows["sublayers"][0].findings] == [f.path for f in findings[12:24]]
    assert outside_layers(report) == findings[-1:]
    assert levels([0, 1e-30, 1e-12, 1.1e-12, inf, nan], 1e-12).tolist() == [0, 0, 6, 7, 12, 12]
    assert levels([0, 1e-300], 0.0).tolist() == [0, 12]


def test_what_cannot_be_compared_says_why(equal):
    findings = [*equal.report.findings]
    findings[10] = replace(findings[10], problem="the candidate has no such array")
    text = page(replace(equal, report=Report(tuple(findings), CRITERIA)), NAMES)
    (cell,) = (
        cell
        for rows in rows_of(text, "heat")
        for row in rows
        for cell in row
        if cell.get("title", "").startswith(f"{findings[10].path}:")
    )
    assert (cell["class"], cell["text"]) == ("level-12", "✗ the candidate has no such array")
    ((_, row),) = rows_of(text, "differing")
    assert [cell["text"] for cell in row] == [findings[10].path, "the candidate has no such array"]


def test_what_the_oracle_and_narrow_dtypes_say(equal):
    criteria = (Criterion("logits", 1e-12, "array", "the errors"),)
    wrong = Report((Finding("logits", "logits", (0, 1), 1.0, 2.0, 1.0, 1e-12),), criteria)
    rungs = tuple(replace(rung, oracle_error=0.25) for rung in equal.rungs)
    ladder = replace(equal, oracle_reports={"Flax": wrong, "PyTorch": equal.report}, rungs=rungs)
    text = page(ladder, NAMES, oracle_name="transformers")
    assert "<p>In float64, Flax differs from transformers in 1 of 1 arrays.</p>" in text
    assert "<p>In float64, PyTorch agrees with transformers.</p>" in text
    assert "<h3>Flax against transformers</h3>" in text
    assert "✗</span> DIFFERENT" in text
    ((header, *rows),) = rows_of(text, "ladder")
    assert header[2]["text"] == "transformers"
    assert {row[2]["text"] for row in rows} == {"2.5e-01"}
    rungs = tuple(replace(rung, ok=rung.name != "logits") for rung in equal.rungs)
    text = page(replace(equal, rungs=rungs), NAMES)
    assert "the errors of the two models are too far apart: logits." in text
    assert "✗</span> DIFFERENT" in text


def test_translations_that_differ(equal):
    same = {
        "beam_size": 1,
        "search": "Flax",
        "equal": 40,
        "ties": {},
        "different": {},
        "tokens": 99,
        "score_error": 0.0,
    }
    margins = dict.fromkeys(range(3, 28), 0.5)
    other = {**same, "beam_size": 5, "equal": 14, "ties": {9: 1e-7}, "different": margins}
    text = page(equal, NAMES, translations=(same, other), texts={3: "<b>drei</b>", 9: "neun"})
    texts = Reader(text).texts
    assert "✗</span> DIFFERENT" in text
    assert "25 translations differ beyond rounding." in text
    assert "40 of 40" in texts["translations"]
    assert "14 of 40" in texts["translations"]
    assert "line 3: DIFFERENT, margin 5.0e-01: <b>drei</b>" in texts["translations"]
    assert "line 9: within rounding, margin 1.0e-07: neun" in texts["translations"]
    assert "line 22: DIFFERENT" in texts["translations"]
    assert "line 23:" not in texts["translations"]
    assert "… and 5 more DIFFERENT" in texts["translations"]
    text = page(equal, NAMES, translations=(same,))
    assert "✓</span> equal" in text
    assert "No translation differs beyond rounding." in text
