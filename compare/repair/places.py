"""The line at which a step is missing: where its input is computed, where its result is used, or in a module's code."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from ..capture.trace import DEPTH, Code, Operation, Trace
from ..matching.matching import producers
from ..matching.regions import ARRANGING, COPYING, Region
from ..matching.uses import USE
from .alternatives import kind
from .edits import Repair
from .repairs import PASSING, RESIDUALS
from .state import State

_SIGNS = {"neg", "negative"}


def place_of_missing(state: State, value: int, reference: Region, is_activation: bool = False) -> Operation | None:
    """Where a step after a value is missing: in the code of the module whose parameters it uses, if that is known.

    People leave out an activation where its input is computed, and a sign or a norm of a residual's branch where its
    output is used.
    """
    producer, number = producers(state.candidate.trace), value
    made: list[Operation] = []  # what passes the value on, and the operation that computed it
    passing = (*PASSING, *ARRANGING) if is_activation else PASSING
    while number in producer and (not made or made[-1].name in passing):
        made.append(producer[number])
        number = made[-1].inputs[0] if made[-1].inputs else -1
    own = list(takewhile(lambda operation: operation.name != USE, made))  # of this use alone
    made = [operation for operation in made if operation.name != USE]
    use = next(iter(use_of(state, value)), None)
    is_shared = len(own) < len(made)
    code = code_of_missing(state, reference)
    casts = [operation for operation in made if operation.name == "convert_element_type"]
    cast = next((cast for cast in casts if (is_activation if code is None else cast.line in code)), None)
    if cast is not None:  # of what the step was applied to
        return cast
    if not made or (is_activation and not own):
        return use
    if is_activation:
        return own[-1] if _is_beside_input(state, reference) else where_both_are(own[-1], use)
    before, after = _first_within(reversed(own), code), None if use is None else _first_within([use], code)
    after = after or _first_within(_users(state.candidate.trace, [value]), code)
    before = before or (None if after is not None else _first_within(reversed(made), code))
    if before is not None and after is not None:
        is_inner = before.lines not in [operation.lines for operation in made]  # of a module that this one calls
        is_late = _number(before) >= _number(after)  # of an earlier call of the same code
        if is_inner or is_late or _is_on_line_of_use(state, reference):
            before = None
    if before is not None or after is not None:
        return before or after
    if use is not None and _is_on_line_of_use(state, reference):
        return use
    sign = kind(reference.operations[-1]) in _SIGNS
    is_one_function = use is None or (made[-1].lines[1:] == use.lines[1:] and not is_shared and not sign)
    return made[-1] if is_one_function else use


def _is_beside_input(state: State, reference: Region) -> bool:
    """Whether the reference takes a step in the function that computes its input."""
    producer, step = producers(state.reference.trace), reference.operations[-1]
    made = [producer[n] for n in reference.operations[0].inputs if n in producer]
    return not made or any(operation.lines[1:] == step.lines[1:] for operation in made)


def _is_on_line_of_use(state: State, reference: Region) -> bool:
    """Whether the reference takes a step on the line that uses its result, and not on that which computes its input."""
    trace, step = state.reference.trace, reference.operations[-1]
    producer = producers(trace)
    users = _users(trace, step.outputs)
    made = [producer[n] for o in reference.operations for n in o.inputs if n in reference.leaves and n in producer]
    return bool(users) and all(_share_a_line(step, o) for o in users) and not any(_share_a_line(step, o) for o in made)


def _share_a_line(one: Operation, other: Operation) -> bool:
    """Whether one line of the innermost function that calls both, or one of them, has both."""
    is_called = one.line in other.lines or other.line in one.lines
    return is_called or where_both_are(one, other).line == where_both_are(other, one).line


def _users(trace: Trace, numbers: Iterable[int]) -> list[Operation]:
    """The operations that compute with these values, or with the same numbers arranged."""
    same, users = {*numbers}, []
    for operation in trace.operations:
        if not same.isdisjoint(operation.inputs):
            if operation.name in COPYING:
                same.update(operation.outputs)
            else:
                users.append(operation)
    return users


def _first_within(operations: Iterable[Operation], code: Code | None) -> Operation | None:
    """The first operation that a line of a module's code calls, as the innermost of these lines does; None if none."""
    for operation in operations:
        places = [i for i, line in enumerate(operation.lines) if code is not None and line in code]
        if places:
            return replace(operation, lines=operation.lines[places[0] :])
    return None


def _number(operation: Operation) -> int:
    return int(operation.line.rpartition(":")[2])


def code_of_missing(state: State, reference: Region) -> Code | None:
    """The code of the module with an unused parameter of this region; if no operation is in it, of the one around."""
    trace = state.candidate.trace
    unused = set(trace.unused_parameters())
    for name, number in trace.parameters.items():
        if name in unused and not set(reference.leaves).isdisjoint(state.matches.of_candidate.get(number, ())):
            module = name.rpartition(".")[0]
            is_called = any(_is_within(o.module, module) for o in trace.operations)
            return trace.code.get(module if is_called else module.rpartition(".")[0])
    return None


def idle_operand(state: State, repair: Repair, reference: Region) -> Operation | None:
    """What computes the other operand from the value itself, in a function that returns without it; None if nothing."""
    trace, producer = state.candidate.trace, producers(state.candidate.trace)
    live = trace.ancestors()
    origin = repair.number
    while origin in producer and producer[origin].name == USE:
        (origin,) = producer[origin].inputs
    for number in reference.leaves if repair.text in RESIDUALS else ():
        for other in state.matches.of_reference.get(number, ()):
            is_computed = other in producer and producer[other].name not in PASSING
            if is_computed and other not in live and origin in trace.ancestors([other]):
                return producer[other]
    return None


def where_both_are(operation: Operation, other: Operation | None) -> Operation:
    """An operation at its line in the innermost function that calls both: there all operands of a step are known."""
    lines, others = operation.lines, () if other is None else other.lines
    pairs = [(lines[i:], others[k:]) for i in range(len(lines)) for k in range(len(others))]
    callers = next((one for one, two in pairs if all(a == b for a, b in zip(one, two, strict=False))), ())
    if not callers and DEPTH in (len(lines), len(others)):  # more are not known
        return operation
    return replace(operation, lines=lines[max(len(lines) - len(callers) - 1, 0) :])


def is_returned(state: State, value: int, made: Operation | None, use: Operation, reference: Region) -> bool:
    """Whether the module whose code computes a value does not use it itself, but uses the step's other operands."""
    trace = state.candidate.trace
    paths = [
        path
        for path, code in trace.code.items()
        if made is not None and _is_within(made.module, path) and any(line in code for line in made.lines)
    ]
    if not paths or _is_within(use.module, max(paths, key=len)):
        return False
    leaves = set(reference.leaves) - {*state.matches.of_candidate.get(value, ())}
    operands = {n for n, others in state.matches.of_candidate.items() if not leaves.isdisjoint(others)}
    inside = (o for o in trace.operations if _is_within(o.module, max(paths, key=len)))
    return any(not operands.isdisjoint(o.inputs) for o in inside)


def _is_within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def use_of(state: State, number: int) -> tuple[Operation, ...]:
    """The use of a value that the reference has too, before which a step is missing; none if the value differs.

    Several uses have the line within which all of them are, unless the value is computed there too.
    """
    if number not in state.matches.of_candidate:
        return ()
    trace, suspect = state.candidate.trace, set(state.suspects[1])
    made = producers(trace).get(number)
    if made is not None and made.name == USE:
        return (made,)
    passed_on = {o.outputs[0] for o in trace.operations if o.name == USE and number in o.inputs}
    all_users = [o for o in trace.operations if number in o.inputs]
    users = [o for o in all_users if not suspect.isdisjoint(o.outputs)] or (all_users if len(all_users) == 1 else [])
    users += [o for o in trace.operations if not passed_on.isdisjoint(o.outputs) and o not in users]
    if not users:
        return ()
    outer = () if made is None else made.lines
    own = takewhile(lambda line: line not in outer, users[0].lines)  # the rest may be too far out to be known of both
    shared = [i for i, line in enumerate(own) if all(line in user.lines for user in users)]
    lines = users[0].lines[shared[0] if shared else 0 :]
    return (Operation(USE, (number,), (), users[0].module, lines),)
