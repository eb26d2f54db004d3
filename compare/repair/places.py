"""The line at which a step is missing: where its input is computed, where its result is used, or in a module's code."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import numpy as np

from ..capture.trace import DEPTH, Code, Operation, Trace
from ..matching.matching import producers
from ..matching.regions import ARRANGING, COPYING, SELECTIONS, Region
from ..matching.uses import USE
from .alternatives import kind
from .edits import Repair
from .repairs import FACTORS, PASSING, PRODUCTS, RESIDUALS
from .state import State

_SIGNS = {"neg", "negative"}
_PARTS = {"slice", "dynamic_slice", "aten.slice"}


def place_of_missing(state: State, value: int, reference: Region, is_activation: bool = False) -> Operation | None:
    """Where a step after a value is missing: in the code of the module whose parameters it uses, if that is known.

    People leave out an activation where its input is computed, and a sign or a norm of a residual's branch where its
    output is used.
    """
    producer, number = producers(state.candidate.trace), value
    made: list[Operation] = []  # what passes the value on, and the operation that computed it
    passing = (*PASSING, *ARRANGING) if is_activation else PASSING
    users = Counter(n for operation in state.candidate.trace.operations for n in operation.inputs)

    def is_passed_on(operation: Operation) -> bool:
        is_part = is_activation and operation.name in _PARTS and users[operation.inputs[0]] == 1
        return is_part or operation.name in passing

    while number in producer and (not made or is_passed_on(made[-1])):
        made.append(producer[number])
        number = made[-1].inputs[0] if made[-1].inputs else -1
    is_idle = bool(made) and made[0].name not in passing and any(_are_equal(state, value, n) for n in made[0].inputs)
    if is_idle and kind(made[0]) in map(kind, reference.operations):
        return made[0]  # the rest of the step, such as a factor of one
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
        is_inner = _is_beside_input(state, reference) and not _is_called_without(state, own[-1], reference)
        return own[-1] if is_inner else where_both_are(own[-1], use)
    before, after = _first_within(reversed(own), code), None if use is None else _first_within([use], code)
    after = after or _first_within(_users(state.candidate.trace, [value]), code)
    before = before or (None if after is not None else _first_within(reversed(made), code))
    if before is not None and after is not None:
        is_inner = before.lines not in [operation.lines for operation in made]  # of a module that this one calls
        is_late = _number(before) >= _number(after)  # of an earlier call of the same code
        if is_late and _follows_its_input(state, reference):
            return before
        if is_inner or is_late or _is_on_line_of_use(state, reference):
            before = None
    if before is not None or after is not None:
        return before or after
    beside = _use_beside(state, value, reference)
    if beside is not None:
        return beside
    if use is not None and _is_in_function_of_use(state, reference):
        users = _users(state.candidate.trace, [value])
        return users[0] if len({user.lines[1:] for user in users}) == 1 else use
    if use is not None and _is_on_line_of_use(state, reference):
        return use
    sign = kind(reference.operations[-1]) in _SIGNS
    if use is None or (made[-1].lines[1:] == use.lines[1:] and not is_shared and not sign):
        return made[-1]
    selects = reference.operations[-1].name in SELECTIONS  # as the use may: then it is not missing, but otherwise
    if selects and any(user.name in SELECTIONS for user in _users(state.candidate.trace, [value])):
        return use
    is_at_the_end = not is_shared and not sign and _follows_its_input(state, reference)
    return where_both_are(made[-1], use) if is_at_the_end else use


def _are_equal(state: State, one: int, other: int) -> bool:
    return np.array_equal(state.candidate.value(one), state.candidate.value(other))


def _is_beside_input(state: State, reference: Region) -> bool:
    """Whether the reference takes a step in the function that computes its input."""
    producer, step = producers(state.reference.trace), reference.operations[-1]
    made = [producer[n] for n in reference.operations[0].inputs if n in producer]
    return not made or any(operation.lines[1:] == step.lines[1:] for operation in made)


def _follows_its_input(state: State, reference: Region) -> bool:
    """Whether the reference takes a step later in the same call in which its input is computed."""
    producer, step = producers(state.reference.trace), reference.operations[-1]
    return any(_is_before(producer[n], step) for n in reference.operations[0].inputs if n in producer)


def _is_before(one: Operation, other: Operation) -> bool:
    """Whether an operation is on an earlier line than another in the function that calls both, if that is known."""
    lines = [where_both_are(*pair).line.rpartition(":") for pair in ((one, other), (other, one))]
    return bool(lines[0][0]) and lines[0][0] == lines[1][0] and int(lines[0][2]) < int(lines[1][2])


def _is_called_without(state: State, made: Operation, reference: Region) -> bool:
    """Whether the function that computes a value is called elsewhere too, where the reference takes no such step."""
    step = reference.operations[-1]
    for other in state.candidate.trace.operations:
        if other.name == made.name and other.lines[:1] == made.lines[:1] and other.lines[1:] != made.lines[1:]:
            sources = state.matches.of_candidate.get(other.outputs[0], ())
            names = {kind(user) for user in _users(state.reference.trace, sources)}
            if sources and kind(step) not in names and kind(reference.operations[0]) not in names:
                return True
    return False


def _is_on_line_of_use(state: State, reference: Region) -> bool:
    """Whether the reference takes a step on the line that uses its result, and not on that which computes its input."""
    trace, step = state.reference.trace, reference.operations[-1]
    producer = producers(trace)
    users = _users(trace, step.outputs)
    made = [producer[n] for o in reference.operations for n in o.inputs if n in reference.leaves and n in producer]
    return bool(users) and all(_share_a_line(step, o) for o in users) and not any(_share_a_line(step, o) for o in made)


def _is_in_function_of_use(state: State, reference: Region) -> bool:
    """Whether the reference takes a step in the call that uses its result, and not in that which computes its input."""
    trace, step = state.reference.trace, reference.operations[-1]
    producer = producers(trace)
    users, own = _users(trace, step.outputs), (step.module, step.lines[1:])
    entering = [_computed(producer, n) for o in reference.operations for n in o.inputs if n in reference.leaves]
    made = [producer[n] for n in entering if n in producer]
    inside, before = ({(o.module, o.lines[1:]) for o in operations} for operations in (users, made))
    return bool(step.module) and inside == {own} and own not in before


def _use_beside(state: State, value: int, reference: Region) -> Operation | None:
    """The product of a value and a parameter that stands beside the unused ones of a step, at its own line."""
    trace, producer = state.candidate.trace, producers(state.candidate.trace)
    names = {number: name for name, number in trace.parameters.items()}
    with_names: list[tuple[Operation, str]] = []
    for operation in trace.operations:
        sources = [_source(producer, number) for number in operation.inputs]
        with_names += [(operation, names[number]) for number in sources if number in names]
    groups = {_group(name) for name in _missing_parameters(state, reference)} - {""}
    users = {id(user) for user in _users(trace, [value]) if kind(user) in PRODUCTS}
    for user, name in with_names:
        if id(user) in users and _group(name) in groups:
            module = name.rpartition(".")[0]
            others = {operation.line for operation, other in with_names if not other.startswith(f"{module}.")}
            places = [i for i, line in enumerate(user.lines) if line not in others]
            return replace(user, lines=user.lines[places[0] :]) if places else user
    return None


def _source(producer: Mapping[int, Operation], number: int) -> int:
    """The value of which one is computed alone, such as the parameters of all layers of which it is a layer's."""
    while number in producer and len(producer[number].inputs) == 1:
        (number,) = producer[number].inputs
    return number


def _group(name: str) -> str:
    """The name that a parameter's module has in common with those beside it."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _missing_parameters(state: State, reference: Region) -> Iterator[str]:
    """The unused parameters of the candidate that a region of the reference uses."""
    trace, producer = state.candidate.trace, producers(state.candidate.trace)
    partners = {other for leaf in reference.leaves for other in state.matches.of_reference.get(leaf, ())}
    sources = {_source(producer, number) for number in partners}
    unused = set(trace.unused_parameters())
    yield from (name for name, number in trace.parameters.items() if name in unused and number in sources)


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
    for name in _missing_parameters(state, reference):
        module = name.rpartition(".")[0]
        is_called = any(_is_within(o.module, module) for o in trace.operations)
        return trace.code.get(module if is_called else _group(name))
    return None


def place_of_operand(state: State, repair: Repair, reference: Region) -> Operation | None:
    """Where a sign is missing, or a step with a value of the reference: where a value is used, or computed.

    People leave out a sign where the value is used, a factor where the other one is computed, and a residual where the
    port adds its others; else in the function that uses the sum, unless that is called later.
    """
    use = next(iter(use_of(state, repair.number)), None)
    if use is None:
        return repair.operation
    producer = producers(state.candidate.trace)
    made = producer.get(_computed(producer, repair.number))
    idle = _idle_operand(state, repair, reference)
    is_factor = repair.text in FACTORS and not state.reference.trace.gradients  # derivatives lack factors
    if is_factor and idle is not None:
        return where_both_are(use, idle)
    if is_factor and made is not None and where_both_are(made, use).lines == made.lines:
        return made
    adds_inside = _adds_where_it_computes(state)
    if idle is not None:
        is_inside = not _uses_where_it_adds(state, reference) if adds_inside is None else adds_inside
        return _within_branch(state, repair.number, idle) if is_inside else where_both_are(idle, use)
    if made is None or made.name in COPYING:
        return where_both_are(use, made)
    if repair.text not in RESIDUALS:
        return repair.operation
    is_sum = repair.text == RESIDUALS[0] or not state.reference.trace.gradients  # derivatives lack factors
    if not is_sum or _is_returned(state, repair.number, made, use, reference):
        return where_both_are(made, use)
    if repair.text == RESIDUALS[0] and adds_inside:
        early, matched = state.candidate.trace.ancestors(made.outputs), state.matches.of_reference
        operands = [n for leaf in reference.leaves for n in matched.get(leaf, ()) if n in early]
        return _within_branch(state, operands[0], made) if operands else made
    return where_both_are(made, use) if _is_before(use, made) else where_both_are(use, made)


def _used(producer: Mapping[int, Operation], number: int) -> int:
    """The value that is used."""
    while number in producer and producer[number].name == USE:
        (number,) = producer[number].inputs
    return number


def place_of_call(state: State, operation: Operation) -> Operation:
    """Where an operation is to be changed: in the code that calls its function, if another call of it is right."""
    matched, changed = state.matches.of_candidate, state.candidate.changes
    calls: dict[tuple[str, ...], list[Operation]] = {}
    for other in state.candidate.trace.operations:
        if other.name == operation.name and other.lines[:1] == operation.lines[:1]:
            calls.setdefault(other.lines[1:], []).append(other)
    own = calls.get(operation.lines[1:], [])
    places = [i for i, other in enumerate(own) if other.outputs == operation.outputs]
    for lines, operations in calls.items():
        is_alike = lines[:1] != operation.lines[1:2] and len(operations) == len(own) and bool(places)
        if is_alike and all(n in matched and n not in changed for n in operations[places[0]].outputs):
            return replace(operation, lines=operation.lines[1:])
    return operation


def _computed(producer: Mapping[int, Operation], number: int) -> int:
    """The value that one passes on."""
    while number in producer and producer[number].name in PASSING and producer[number].inputs[0] in producer:
        number = producer[number].inputs[0]
    return number


def _adds_where_it_computes(state: State) -> bool | None:
    """Whether the function that computes a residual's branch adds it too, at every residual that both sides have.

    None if they have none. A branch has a product; a recurrence without one is no residual.
    """
    trace, matched = state.candidate.trace, state.matches.of_candidate
    producer = producers(trace)
    order = {n: i for i, operation in enumerate(trace.operations) for n in operation.outputs}
    found: list[bool] = []
    for operation in trace.operations:
        if kind(operation) == "add" and operation.outputs[0] in matched and len(operation.inputs) == 2:
            early, late = sorted((_computed(producer, n) for n in operation.inputs), key=lambda n: order.get(n, -1))
            shapes = {trace.values.kept(n).shape for n in (early, late, *operation.outputs)}
            is_residual = early in order and len(shapes) == 1
            between = trace.ancestors([late]) & trace.dependents([early]) if is_residual else set()
            if any(kind(o) in PRODUCTS and not between.isdisjoint(o.outputs) for o in trace.operations):
                found.append(producer[late].lines[1:] == operation.lines[1:])
    return all(found) if found else None


def _uses_where_it_adds(state: State, reference: Region) -> bool:
    """Whether the reference's function that adds goes on with the sum, and does not return it."""
    trace = state.reference.trace
    for step in [o for o in reference.operations if kind(o) == "add"][:1]:
        users = _users(trace, step.outputs)
        return any(where_both_are(step, o).lines == step.lines and _is_before(step, o) for o in users)
    return False


def _idle_operand(state: State, repair: Repair, reference: Region) -> Operation | None:
    """What computes the other operand, which nothing uses; a residual's branch, from the value itself."""
    trace, producer = state.candidate.trace, producers(state.candidate.trace)
    live = trace.ancestors()
    origin = _used(producer, repair.number)
    shape = state.candidate.value(origin).shape
    operands = (*reference.leaves, *(n for operation in reference.operations for n in operation.outputs))
    for number in operands if repair.text in RESIDUALS else ():
        for other in state.matches.of_reference.get(number, ()):
            is_computed = other in producer and producer[other].name not in PASSING
            is_factor = repair.text in FACTORS and state.candidate.value(other).shape == shape
            if is_computed and other not in live and (is_factor or origin in trace.ancestors([other])):
                return producer[other]
    return None


def _within_branch(state: State, value: int, last: Operation) -> Operation:
    """The last operation of a branch that begins with a value, at its line in the function that calls all of it."""
    trace = state.candidate.trace
    first = _used(producers(trace), value)
    branch = trace.ancestors(last.outputs) & trace.dependents([first]) - {first}
    operations = (o for o in trace.operations if not branch.isdisjoint(o.outputs) and o.name not in PASSING)
    return where_both_are(last, next(operations, None))


def _is_returned(state: State, value: int, made: Operation | None, use: Operation, reference: Region) -> bool:
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


def where_both_are(operation: Operation, other: Operation | None) -> Operation:
    """An operation at its line in the innermost function that calls both: there all operands of a step are known."""
    lines, others = operation.lines, () if other is None else other.lines
    pairs = [(lines[i:], others[k:]) for i in range(len(lines)) for k in range(len(others))]
    callers = next((one for one, two in pairs if all(a == b for a, b in zip(one, two, strict=False))), ())
    if not callers and DEPTH in (len(lines), len(others)):  # more are not known
        return operation
    return replace(operation, lines=lines[max(len(lines) - len(callers) - 1, 0) :])


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
