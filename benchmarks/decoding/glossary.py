"""Whether a model uses target terms that it never read in training: terms and BLEU on Multi30k, with and without them.

`python -m benchmarks.decoding.glossary PAGE FOLDER RUN` prints a table and writes it into the page. FOLDER has Multi30k
in German and English, as text or .gz. RUN is a German-English run that was trained with the glossary RUN.tsv; if it
does not exist, both are made. Terms are pairs of words that occur in the same sentences; the test's are not in RUN.tsv.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.conversion.text_matrix import lines
from benchmarks.decoding.ctranslate2_matrix import LONGEST, train_run
from benchmarks.pages import marks, write_between, write_table
from twinax.inference.scores import corpus_scores
from twinax.inference.translator import load
from twinax.train.text.glossary import Glossary

UPDATES = 9000
LEAST_COUNT, LEAST_DICE = 4, 0.3  # sentences with a source word, and its association with a target word
LEAST_LETTERS, MOST_SENTENCES = 3, 0.05  # without function words: letters of a word, and its share of the sentences
HELD_OUT = 3  # every third noun is a term of the test
HEADER = ("target terms", "terms", "translated by them", "with the glossary", "BLEU", "with the glossary")
Terms = dict[str, str]


def main(page: Path, folder: Path, run: Path) -> None:
    """Measure, print the table and write it into the page."""
    for name in ("glossary", "glossary terms"):
        marks(page, name)
    terms = word_pairs(lines(folder, "train", "de"), lines(folder, "train", "en"))
    held_out = dict([pair for pair in terms.items() if pair[0][0].isupper()][::HELD_OUT])  # German nouns
    training = {source: target for source, target in terms.items() if source not in held_out}
    run.parent.mkdir(parents=True, exist_ok=True)
    path = Path(f"{run}.tsv")
    path.write_text("".join(f"{source}\t{target}\n" for source, target in training.items()), encoding="utf-8")
    train_run(folder, run, UPDATES, ("--glossary", str(path)))
    targets = [*held_out.values()]
    middle = len(targets) // 2
    others = dict(zip(held_out, targets[middle:] + targets[:middle], strict=True))
    translator = load(run)
    sources, references = (lines(folder, "test_2016_flickr", side) for side in ("de", "en"))
    plain = translator.translate(sources, max_length=LONGEST)
    rows = []
    for name, replaced in (("of the reference", held_out), ("other nouns", others)):
        translations = translator.with_glossary(replaced).translate(sources, max_length=LONGEST)
        glossary = Glossary(held_out)
        wanted, expected = _wanted(glossary, replaced, sources, references)
        shares = [_share(glossary, wanted, texts) for texts in (plain, translations)]
        bleu = [corpus_scores(texts, [expected])[1].value for texts in (plain, translations)]
        total = sum(counts.total() for counts in wanted)
        rows.append((name, f"{total:,}", *(f"{share:.1%}" for share in shares), *(f"{value:.2f}" for value in bleu)))
    write_table(page, "glossary", HEADER, rows)
    names = Glossary({source: source for source in held_out})
    used = len({span.target for text in sources for span in names.spans(text)})
    write_between(
        page,
        "glossary terms",
        f"Training had {len(training):,} terms; the test has {len(held_out):,} others, of which {used:,} occur in it.",
    )


def word_pairs(sources: Sequence[str], targets: Sequence[str]) -> Terms:
    """Pairs of words, each the other's best by the Dice coefficient of the sentences that have them, in order."""
    sides = [[{*re.findall(r"\w+", text)} for text in texts] for texts in (sources, targets)]
    counts = [Counter(word for words in side for word in words) for side in sides]
    known = [{word for word, n in side.items() if _is_content(word, n, len(sources))} for side in counts]
    pairs: Counter[tuple[str, str]] = Counter()
    for source, target in zip(*sides, strict=True):
        pairs.update(product(source & known[0], target & known[1]))
    dice = {pair: 2 * n / (counts[0][pair[0]] + counts[1][pair[1]]) for pair, n in pairs.items()}
    best: list[dict[str, str]] = [{}, {}]
    for pair in sorted(dice, key=lambda pair: (-dice[pair], pair)):
        for side in (0, 1):
            best[side].setdefault(pair[side], pair[1 - side])
    return {
        source: target
        for source, target in sorted(best[0].items())
        if best[1][target] == source and dice[source, target] >= LEAST_DICE
    }


def _is_content(word: str, number: int, sentences: int) -> bool:
    """Whether a word is neither rare nor a function word."""
    return len(word) >= LEAST_LETTERS and LEAST_COUNT <= number <= MOST_SENTENCES * sentences


def _wanted(
    glossary: Glossary, replaced: Terms, sources: Sequence[str], references: Sequence[str]
) -> tuple[list[Counter[str]], list[str]]:
    """For each sentence, (how often the translation should have each target term, the reference with those terms).

    A term of the source counts if the reference has its own target term.
    """
    own = {target: replaced[source] for source, target in glossary.terms.items()}
    wanted, expected = [], []
    for source, reference in zip(sources, references, strict=True):
        targets = [span.target for span in glossary.spans_of_pair(source, reference)]
        wanted.append(Counter(own[target] for target in targets))
        pattern = rf"\b({'|'.join(map(re.escape, {*targets}))})\b"
        expected.append(re.sub(pattern, lambda match: own[match[0]], reference) if targets else reference)
    return wanted, expected


def _share(glossary: Glossary, wanted: Sequence[Mapping[str, int]], translations: Sequence[str]) -> float:
    """The share of the target terms that are in the translations, as often as they should be."""
    hits = [
        min(n, glossary.count(target, text))
        for counts, text in zip(wanted, translations, strict=True)
        for target, n in counts.items()
    ]
    return sum(hits) / sum(n for counts in wanted for n in counts.values())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.decoding.glossary PAGE FOLDER RUN")
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
