"""A fragment of English and Italian: sentence pairs from a grammar and a lexicon.

The Italian cannot be produced word by word: articles depend on gender, number and the next sound; adjectives agree and
stand before or after their noun; verbs inflect for person and tense; prepositions contract with articles; subject
pronouns are dropped. Some combinations of adjective and noun, and of verb and object noun, are held out of training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

# English singular and plural, Italian singular and plural, gender; mf: masculine, and feminine in the plural
_NOUNS = """
cat cats gatto gatti m|dog dogs cane cani m|horse horses cavallo cavalli m|friend friends amico amici m
student students studente studenti m|uncle uncles zio zii m|aunt aunts zia zie f
mirror mirrors specchio specchi m|tree trees albero alberi m|house houses casa case f
girl girls ragazza ragazze f|boy boys ragazzo ragazzi m|woman women donna donne f|man men uomo uomini m
book books libro libri m|apple apples mela mele f|island islands isola isole f|key keys chiave chiavi f
flower flowers fiore fiori m|city cities città città f|chair chairs sedia sedie f
school schools scuola scuole f|station stations stazione stazioni f|garden gardens giardino giardini m
car cars macchina macchine f|letter letters lettera lettere f|window windows finestra finestre f
bird birds uccello uccelli m|orange oranges arancia arance f|egg eggs uovo uova mf|shoe shoes scarpa scarpe f
hand hands mano mani f|backpack backpacks zaino zaini m|stamp stamps francobollo francobolli m
"""
_PEOPLE = ("friend", "student", "uncle", "aunt", "girl", "boy", "woman", "man", "cat", "dog", "horse", "bird")
_FAMILY = ("uncle", "aunt")  # "my uncle" has no article
_PLACES = ("house", "island", "city", "school", "station", "garden", "car", "tree")

# English, Italian by gender and number (m s, f s, m p, f p); _BEFORE precede their noun, _AFTER follow it
_BEFORE = """
old vecchio vecchia vecchi vecchie|young giovane giovane giovani giovani|new nuovo nuova nuovi nuove
small piccolo piccola piccoli piccole|big grande grande grandi grandi|long lungo lunga lunghi lunghe
"""
_AFTER = """
red rosso rossa rossi rosse|white bianco bianca bianchi bianche|black nero nera neri nere
green verde verde verdi verdi|blue blu blu blu blu|tired stanco stanca stanchi stanche
happy felice felice felici felici|clean pulito pulita puliti pulite|slow lento lenta lenti lente
strange strano strana strani strane|Italian italiano italiana italiani italiane
quiet tranquillo tranquilla tranquilli tranquille
"""
# English I and he, past; Italian io, tu, lui, noi, loro, and participle
_VERBS = """
see sees saw vedo vedi vede vediamo vedono visto
buy buys bought compro compri compra compriamo comprano comprato
find finds found trovo trovi trova troviamo trovano trovato
want wants wanted voglio vuoi vuole vogliamo vogliono voluto|have has had ho hai ha abbiamo hanno avuto
sell sells sold vendo vendi vende vendiamo vendono venduto
wash washes washed lavo lavi lava laviamo lavano lavato
draw draws drew disegno disegni disegna disegniamo disegnano disegnato
lose loses lost perdo perdi perde perdiamo perdono perso
take takes took prendo prendi prende prendiamo prendono preso
hear hears heard sento senti sente sentiamo sentono sentito
paint paints painted dipingo dipingi dipinge dipingiamo dipingono dipinto
choose chooses chose scelgo scegli sceglie scegliamo scelgono scelto
love loves loved amo ami ama amiamo amano amato
know knows knew conosco conosci conosce conosciamo conoscono conosciuto
open opens opened apro apri apre apriamo aprono aperto
"""
_INTRANSITIVE = """
sleep sleeps slept dormo dormi dorme dormiamo dormono dormito
work works worked lavoro lavori lavora lavoriamo lavorano lavorato
sing sings sang canto canti canta cantiamo cantano cantato
wait waits waited aspetto aspetti aspetta aspettiamo aspettano aspettato
walk walks walked cammino cammini cammina camminiamo camminano camminato
eat eats ate mangio mangi mangia mangiamo mangiano mangiato
"""
_HAVE, _BE = ("ho", "hai", "ha", "abbiamo", "hanno"), ("sono", "sei", "è", "siamo", "sono")
_AM, _WAS = ("am", "are", "is", "are", "are"), ("was", "were", "was", "were", "were")
_WAS_ITALIAN = ("ero", "eri", "era", "eravamo", "erano")
_PRONOUNS = ("I", "you", None, "we", "they")  # by person; the third person is a noun
# _CONTRACTED prepositions contract with the article, _FREE ones do not
_CONTRACTED = {"of": ("de", "di"), "to": ("a", "a"), "from": ("da", "da"), "in": ("ne", "in"), "on": ("su", "su")}
_FREE = {"with": "con", "behind": "dietro", "for": "per"}
_POSSESSIVES = {
    "my": ("mio", "mia", "miei", "mie"),
    "your": ("tuo", "tua", "tuoi", "tue"),
    "her": ("suo", "sua", "suoi", "sue"),
    "our": ("nostro", "nostra", "nostri", "nostre"),
}
_THIS = ("questo", "questa", "questi", "queste")
_NUMBERS = {"two": "due", "three": "tre", "four": "quattro", "five": "cinque"}
_VOWELS = "aeiouèàh"


class Noun(NamedTuple):
    """A noun of both languages."""

    singular: str
    plural: str
    singolare: str
    plurale: str
    gender: str

    def form(self, plural: bool) -> int:
        """Index of the agreeing form: m s, f s, m p, f p."""
        return 2 * plural + (self.gender == "f" or (self.gender == "mf" and plural))


class Phrase(NamedTuple):
    """A part of a sentence in both languages."""

    english: str
    italian: str  # without preposition, which `preposition` adds
    plural: bool
    form: int
    noun: str
    article: bool  # whether the Italian begins with a definite article


class Pair(NamedTuple):
    """A sentence in both languages, and its word pairs that can be held out of training."""

    english: str
    italian: str
    word_pairs: frozenset[tuple[str, str]]


@cache
def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row.split()) for line in text.strip().splitlines() for row in line.split("|"))


@cache
def _nouns() -> dict[str, Noun]:
    return {row[0]: Noun(*row) for row in _rows(_NOUNS)}


def _takes_lo(word: str) -> bool:
    """Whether a masculine word takes lo and gli: z, ps, gn, or s and a consonant."""
    return word.startswith(("z", "ps", "gn")) or (word[0] == "s" and word[1] not in _VOWELS)


def definite(word: str, form: int) -> str:
    """The definite article before a word, with its apostrophe or space."""
    if form == 0:
        return "l'" if word[0] in _VOWELS else "lo " if _takes_lo(word) else "il "
    if form == 1:
        return "l'" if word[0] in _VOWELS else "la "
    if form == 2:
        return "gli " if word[0] in _VOWELS or _takes_lo(word) else "i "
    return "le "


def indefinite(word: str, form: int) -> str:
    """The indefinite article before a word; in the plural, the partitive: dei, degli, delle."""
    if form == 0:
        return "uno " if _takes_lo(word) else "un "
    if form == 1:
        return "un'" if word[0] in _VOWELS else "una "
    return contracted("de", definite(word, form))


def contracted(stem: str, article: str) -> str:
    """A preposition and a definite article as one word: del, dello, dell', della, dei, degli, delle."""
    if article == "il ":
        return f"{stem}l "
    if article == "i ":
        return f"{stem}i "
    return f"{stem}{article}" if article == "gli " else f"{stem}l{article}"


@dataclass
class _Generator:
    """Generates random sentences."""

    rng: Random

    def sentence(self) -> Pair:
        make = self.rng.choices((self.action, self.place, self.predicate, self.question), (6, 3, 3, 1))[0]
        return make()

    def noun_phrase(self, word_pairs: set[tuple[str, str]], nouns: tuple[str, ...] | None = None) -> Phrase:
        """Determiner, at most one adjective, noun."""
        rng, noun = self.rng, _nouns()[self.rng.choice(nouns or tuple(_nouns()))]
        kind = rng.choices(("the", "a", "my", "this", "two"), (8, 4, 3, 2, 1))[0]
        plural = kind == "two" or rng.random() < 0.4
        form = noun.form(plural)
        english, italian = (noun.plural, noun.plurale) if plural else (noun.singular, noun.singolare)
        is_bare = rng.random() < 0.5
        if not is_bare:
            before = rng.random() < 0.4
            adjective = rng.choice(_rows(_BEFORE if before else _AFTER))
            word_pairs.add((adjective[0], noun.singular))
            english = f"{adjective[0]} {english}"
            italian = f"{adjective[1 + form]} {italian}" if before else f"{italian} {adjective[1 + form]}"
        article = kind in ("the", "my")
        if kind == "the":
            english, italian = f"the {english}", definite(italian, form) + italian
        elif kind == "a":
            english = f"some {english}" if plural else f"{'an' if english[0] in 'aeiouI' else 'a'} {english}"
            italian = indefinite(italian, form) + italian
        elif kind == "my":
            possessive = rng.choice(tuple(_POSSESSIVES))
            noun_with_possessive = f"{_POSSESSIVES[possessive][form]} {italian}"
            article = not (noun.singular in _FAMILY and not plural and is_bare)
            english, italian = (
                f"{possessive} {english}",
                (definite(noun_with_possessive, form) if article else "") + noun_with_possessive,
            )
        elif kind == "this":
            this = "quest'" if not plural and italian[0] in _VOWELS else f"{_THIS[form]} "
            english, italian = f"{'these' if plural else 'this'} {english}", this + italian
        else:
            number = rng.choice(tuple(_NUMBERS))
            english, italian = f"{number} {english}", f"{_NUMBERS[number]} {italian}"
        return Phrase(english, italian, plural, form, noun.singular, article)

    def preposition(self, phrase: Phrase, english: str) -> tuple[str, str]:
        """The phrase with a preposition before it, in both languages."""
        if english in _FREE:
            italian = f"{_FREE[english]} {phrase.italian}"
        elif phrase.article:
            article, rest = _cut(phrase.italian)
            italian = contracted(_CONTRACTED[english][0], article) + rest
        else:
            italian = f"{_CONTRACTED[english][1]} {phrase.italian}"
        return f"{english} {phrase.english}", italian

    def subject(self, word_pairs: set[tuple[str, str]]) -> tuple[str, str, int, Phrase | None]:
        """(English, Italian and a space, person 0 to 4, noun phrase)."""
        person = self.rng.choices(range(5), (2, 2, 6, 2, 2))[0]
        if person != 2:
            return _PRONOUNS[person] or "", "", person, None
        phrase = self.noun_phrase(word_pairs, _PEOPLE)
        return phrase.english, f"{phrase.italian} ", 4 if phrase.plural else 2, phrase

    def action(self) -> Pair:
        """A sentence with a transitive verb."""
        word_pairs: set[tuple[str, str]] = set()
        verb = self.rng.choice(_rows(_VERBS))
        thing = self.noun_phrase(word_pairs)
        word_pairs.add((verb[0], thing.noun))
        complement = ("", "")
        if self.rng.random() < 0.25:
            complement = self.preposition(self.noun_phrase(word_pairs, _PEOPLE), self.rng.choice(("of", "for", "with")))
        return self._clause(verb, (thing.english, thing.italian), complement, word_pairs)

    def place(self) -> Pair:
        """A sentence with an intransitive verb and a place."""
        word_pairs: set[tuple[str, str]] = set()
        location = self.preposition(
            self.noun_phrase(word_pairs, _PLACES), self.rng.choice(("in", "behind", "from", "to", "on"))
        )
        return self._clause(self.rng.choice(_rows(_INTRANSITIVE)), location, ("", ""), word_pairs)

    def _clause(
        self,
        verb: tuple[str, ...],
        objects: tuple[str, str],
        complement: tuple[str, str],
        word_pairs: set[tuple[str, str]],
    ) -> Pair:
        """A clause in a random tense, possibly negated, possibly as a question."""
        subject, italian_subject, person, _ = self.subject(word_pairs)
        past, negated, is_question = (self.rng.random() < p for p in (0.35, 0.25, 0.2))
        is_third = person == 2
        if is_question or negated:
            auxiliary = "did" if past else "does" if is_third else "do"
            negation = " not" if negated else ""
            english_clause = (
                f"{auxiliary} {subject}{negation} {verb[0]}"
                if is_question
                else f"{subject} {auxiliary}{negation} {verb[0]}"
            )
        else:
            english_clause = f"{subject} {verb[2] if past else verb[1] if is_third else verb[0]}"
        italian_verb = f"{_HAVE[person]} {verb[8]}" if past else verb[3 + person]
        english = " ".join(filter(None, (english_clause, objects[0], complement[0])))
        italian = " ".join(
            filter(None, (f"{italian_subject}{'non ' if negated else ''}{italian_verb}", objects[1], complement[1]))
        )
        return _ended(english, italian, is_question, word_pairs)

    def predicate(self) -> Pair:
        """A sentence with a predicative adjective."""
        word_pairs: set[tuple[str, str]] = set()
        thing = self.noun_phrase(word_pairs)
        adjective = self.rng.choice(_rows(_AFTER))
        word_pairs.add((adjective[0], thing.noun))
        person, past, negated = 4 if thing.plural else 2, self.rng.random() < 0.4, self.rng.random() < 0.25
        is_question = self.rng.random() < 0.2
        copula, negation = (_WAS if past else _AM)[person], " not" if negated else ""
        subject = f"{copula} {thing.english}{negation}" if is_question else f"{thing.english} {copula}{negation}"
        italian_copula = (_WAS_ITALIAN if past else _BE)[person]
        italian = f"{thing.italian} {'non ' if negated else ''}{italian_copula} {adjective[1 + thing.form]}"
        return _ended(f"{subject} {adjective[0]}", italian, is_question, word_pairs)

    def question(self) -> Pair:
        """A question about a place."""
        word_pairs: set[tuple[str, str]] = set()
        thing = self.noun_phrase(word_pairs)
        english = f"where {'are' if thing.plural else 'is'} {thing.english}"
        return _ended(english, f"{'dove sono ' if thing.plural else 'dov’è '}{thing.italian}", True, word_pairs)


def _cut(italian: str) -> tuple[str, str]:
    """(definite article with its space or apostrophe, the rest)."""
    for article in ("l'", "lo ", "il ", "la ", "gli ", "i ", "le "):
        if italian.startswith(article):
            return article, italian[len(article) :]
    raise AssertionError(italian)


def _ended(english: str, italian: str, is_question: bool, word_pairs: set[tuple[str, str]]) -> Pair:
    mark = "?" if is_question else "."
    return Pair(f"{english}{mark}", f"{italian}{mark}".replace("’", "'"), frozenset(word_pairs))


def held_out_pairs(seed: int = 0) -> frozenset[tuple[str, str]]:
    """5 % of all adjective-noun and verb-noun pairs, which training never sees together."""
    nouns = tuple(_nouns())
    words = [row[0] for row in (*_rows(_BEFORE), *_rows(_AFTER), *_rows(_VERBS))]
    candidates = [(word, noun) for word in words for noun in nouns]
    return frozenset(Random(seed).sample(candidates, len(candidates) // 20))


def sentences(seed: int) -> Iterator[Pair]:
    """An infinite stream of sentences, with repetitions."""
    generator = _Generator(Random(seed))
    while True:
        yield generator.sentence()


class Corpus(NamedTuple):
    """Training pairs and two test sets: new sentences, and sentences with held-out word pairs."""

    train: list[Pair]
    unseen_sentences: list[Pair]
    unseen_pairs: list[Pair]


def make_corpus(train: int = 20_000, test: int = 500, seed: int = 0) -> Corpus:
    """A corpus of distinct English sentences; only those of `unseen_pairs` contain held-out word pairs."""
    held_out = held_out_pairs(seed)
    sentence_set, regular, unseen = set(), [], []
    for pair in sentences(seed):
        if pair.english in sentence_set:
            continue
        sentence_set.add(pair.english)
        (unseen if pair.word_pairs & held_out else regular).append(pair)
        if len(regular) >= train + test and len(unseen) >= test:
            break
    return Corpus(regular[:train], regular[train : train + test], unseen[:test])
