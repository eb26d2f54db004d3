"""Mistakes of the command: exit status, messages, and the files that it writes."""

from parity_tests.mutations.planting import Mutation

_OUTPUTS, _MESSAGES, _CLI = "tests/test_outputs.py::", "tests/test_messages.py::", "tests/test_cli.py::"

COMMAND_LINE = (
    Mutation(
        "a command line that cannot be used exits with 1",
        "ending._status",
        "_report(one_line(str(error)), 2)",
        "_report(one_line(str(error)), 1)",
        (f"{_CLI}test_wrong_preset",),
    ),
    Mutation(
        "a defect exits like bad input",
        "ending._status",
        "_report(describe_defect(error), DEFECT)",
        "_report(describe_defect(error), 2)",
        (f"{_MESSAGES}test_an_unforeseen_exception_is_a_defect_of_twinax",),
    ),
    Mutation(
        "memory that is not enough is a defect",
        "ending._status",
        '"out of memory", 2',
        '"out of memory", DEFECT',
        (f"{_MESSAGES}test_memory_that_is_not_enough_is_no_defect",),
    ),
    Mutation(
        "a message is printed with control characters",
        "messages.one_line",
        "[escape(line) for",
        "[line for",
        (f"{_MESSAGES}test_every_message_is_one_printable_line",),
    ),
    Mutation(
        "of a list of problems one is shown",
        "messages.one_line",
        "(*problems[:_SHOWN],",
        "(*problems[:1],",
        (f"{_MESSAGES}test_of_a_list_of_problems_the_first_three_are_shown",),
    ),
    Mutation(
        "--verbose shows no more problems",
        "messages.one_line",
        "if _shows_all:",
        "if _shows_all is None:",
        (f"{_MESSAGES}test_a_list_of_problems_is_one_line_unless_all_are_asked_for",),
    ),
    Mutation(
        "the file of a defect has no traceback",
        "messages.describe_defect",
        "traceback.format_exception(error)",
        "[]",
        (f"{_MESSAGES}test_an_unforeseen_exception_is_a_defect_of_twinax",),
    ),
    Mutation(
        "a command overwrites what it reads",
        "usage.check_outputs",
        "(role := used.get(target)) is not None",
        "(role := None) is not None",
        (f"{_OUTPUTS}test_no_command_overwrites_what_it_reads",),
    ),
    Mutation(
        "a command overwrites a folder's part of a checkpoint",
        "usage._is_part",
        "return True",
        "return False",
        (f"{_OUTPUTS}test_parts_of_a_checkpoint_are_kept_and_other_files_written",),
    ),
    Mutation(
        "a command overwrites a file beside weights",
        "usage._is_part",
        " or path.parent in beside",
        "",
        (f"{_OUTPUTS}test_files_beside_weights_and_in_the_hub_s_cache_are_kept",),
    ),
    Mutation(
        "a command overwrites the hub's files",
        "usage.check_outputs",
        "target.parent in blobs or ",
        "",
        (f"{_OUTPUTS}test_files_beside_weights_and_in_the_hub_s_cache_are_kept",),
    ),
    Mutation(
        "what may not be written is found after the work",
        "usage.check_outputs",
        "os.W_OK",
        "os.F_OK",
        (f"{_OUTPUTS}test_what_may_not_be_written_is_named_at_once",),
    ),
    Mutation(
        "standard output as a file is replaced",
        "usage.write_text",
        'path.startswith(("/dev/", "/proc/")) and',
        'path.startswith("/proc/none") and',
        (f"{_OUTPUTS}test_standard_output_as_a_file_is_appended_to",),
    ),
    Mutation(
        "parity exits with 0 where the twins differ",
        "cli.parity",
        "        )\n    return 0 if equal else 1",
        "        )\n    return 0",
        (f"{_CLI}test_parity_exits_with_1_where_the_twins_differ",),
    ),
)
