"""Recordings: what is read computes what was written, bit by bit, and nothing but a refusal comes of a damaged file."""

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from torch import nn

from twinax.compare.capture.encoding import Other, decoded, encoded
from twinax.compare.capture.models import capture
from twinax.compare.capture.parameters import arrays_of, with_arrays
from twinax.compare.capture.recording import Recording
from twinax.compare.capture.recording_file import read_recording, write_recording
from twinax.compare.capture.trace import CaptureError

NOT_STORED = ("operations", "values")


@np.errstate(all="ignore")
def assert_stored(trace):
    """A trace that was written and read is the same, and leads to the same values from other inputs."""
    with TemporaryDirectory() as folder:
        write_recording(Path(folder, "model.trace"), Recording(trace))
        read = read_recording(Path(folder, "model.trace"))
    for field in dataclasses.fields(trace):
        if field.name not in NOT_STORED:
            assert getattr(read.forward, field.name) == getattr(trace, field.name), field.name
    same(trace.values, read.forward.values)
    for one, other in zip(trace.operations, read.forward.operations, strict=True):
        assert (one.name, one.inputs, one.outputs, one.module, one.lines) == (
            *(other.name, other.inputs, other.outputs),
            *(other.module, other.lines),
        )
        assert (one.compute is None) == (other.compute is None), one.name
        assert one.settings.keys() == other.settings.keys()
    ends = {*trace.parameters.values(), *trace.inputs.values()}
    changes = {n: trace.values[n] * 1.01 for n in ends if trace.values[n].dtype.kind == "f"}
    before, after = trace.replay(changes), read.forward.replay(changes)
    assert before.keys() == after.keys()
    same(before.values(), after.values())


def same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def recorded(folder, gradients=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4)).eval()
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    factors = {"output": np.ones((2, 4))}
    backward = capture(model, (x,), factors) if gradients else None
    path = folder / "model.trace"
    write_recording(path, Recording(capture(model, (x,)), backward, {"x": x}, {"model": "a.py:make"}))
    return path, model, x


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([slice(1, None, 2), np.dtype("float32"), np.dtype("int8"), 1j, complex("inf")])
    | arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int8, np.uint32, np.bool_, np.complex64, np.complex128]),
        arrays.array_shapes(min_dims=0, min_side=0, max_side=3),
        elements={"allow_nan": False},
    ),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_inputs_come_back_as_they_were(value):
    with TemporaryDirectory() as folder:
        trace = capture((lambda p, x: x * p["a"], {"a": torch.ones(2)}), (np.ones(2),))
        write_recording(Path(folder, "x.trace"), Recording(trace, inputs=value))
        assert repr(read_recording(Path(folder, "x.trace")).inputs) == repr(value)


def test_what_json_cannot_hold_is_a_text():
    value = {"function": len, "settings": (torch.float64, torch.strided, torch.contiguous_format, torch.device("cpu"))}
    read = decoded(json.loads(json.dumps(encoded(value, lambda array: array))), lambda array: array)
    assert read == {"function": Other(repr(len)), "settings": value["settings"]}


def test_the_file_is_a_safetensors_file_with_parameters_in_float32(tmp_path):
    path, model, _ = recorded(tmp_path)
    with safe_open(path, "numpy") as file:
        stored = [file.get_tensor(key) for key in file.offset_keys()]
    weight = model[0].weight.detach().numpy().ravel()
    assert sum(array.dtype == np.float32 and np.array_equal(array, weight) for array in stored) == 1


def test_parameters_gradients_and_versions(tmp_path):
    path, model, x = recorded(tmp_path, gradients=True)
    recording = read_recording(path)
    assert recording.about == {"model": "a.py:make"}
    assert recording.inputs.keys() == {"x"}
    same([recording.inputs["x"]], [x])
    same(arrays_of(recording).values(), arrays_of(model).values())
    loss = model.double()(torch.from_numpy(x).double()).sum()
    loss.backward()
    backward = recording.backward
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(backward.values[backward.gradients[name]], parameter.grad, atol=1e-12)
    with pytest.raises(CaptureError, match=r"model\.trace: its gradients are those of another sum"):
        capture(recording, (), {"output": np.zeros((2, 4))})


def test_other_parameters_lead_to_the_outputs_of_a_model_that_has_them(tmp_path):
    path, model, x = recorded(tmp_path)
    new = {name: array + np.float32(0.5) for name, array in arrays_of(model).items()}
    changed = with_arrays(read_recording(path), new).forward
    expected = capture(with_arrays(model, new), (x,))
    same([changed.values[changed.outputs["output"]]], [expected.values[expected.outputs["output"]]])


def test_a_recording_without_gradients_says_how_they_are_recorded(tmp_path):
    recording = read_recording(recorded(tmp_path)[0])
    with pytest.raises(CaptureError, match=r"has no gradients; record it with --gradients"):
        capture(recording, (), {"output": np.ones((2, 4))})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused(data):
    with TemporaryDirectory() as folder:
        path = recorded(Path(folder))[0]
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(CaptureError) as error:
            read_recording(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)


def rewritten(path, change):
    """The file with another document, whose digest is right."""
    from twinax.compare.capture import recording_file

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    document = json.loads(header["__metadata__"]["twinax.trace"])
    change(document)
    text = json.dumps(document)
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    digest = recording_file._digest([text, json.dumps(entries)], [np.frombuffer(data, np.uint8)])
    header["__metadata__"] = {"twinax.trace": text, "twinax.digest": digest}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.update(version=9), "has version 9 of the format, this twinax reads 1"),
        (lambda d: d.pop("forward"), "has no trace of the outputs"),
        (lambda d: d["forward"].update(framework="MXNet"), "MXNet is not a framework"),
        (lambda d: d["forward"]["operations"][0].__setitem__(1, [99999]), "names a value that is not in the file"),
        (lambda d: d["forward"]["values"][0].__setitem__(1, [7, 7]), "is damaged"),
        (lambda d: d["forward"].update(outputs={"output": -1000}), "is damaged"),
        (lambda d: d.update(forward=[]), "is damaged"),
        (lambda d: d.update(inputs={"pickle": "x"}), "pickle is not a kind of setting"),
    ],
)
def test_a_document_that_was_changed_is_refused(change, line, tmp_path):
    path = recorded(tmp_path)[0]
    rewritten(path, change)
    with pytest.raises(CaptureError, match=line):
        read_recording(path)


@pytest.mark.parametrize("name", ["aten.from_file", "aten.save", "aten.nothing", "os.system", "aten.__class__"])
def test_an_operation_that_is_none_of_tensors_is_not_computed(name, tmp_path):
    path = recorded(tmp_path)[0]
    rewritten(path, lambda d: d["forward"]["operations"][0].__setitem__(0, name))
    recording = read_recording(path)
    assert recording.forward.operations[0].compute is None
    assert f"other inputs, because {name} cannot be computed here" in recording.gaps()[0]
    with pytest.raises(CaptureError, match=f"{name} cannot be computed here"):
        with_arrays(recording, {"0.weight": np.ones((4, 3), np.float32)})
