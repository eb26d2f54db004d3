"""A small piece of English and Italian: sentences in pairs, from a grammar and a lexicon.

Italian has what a copy of words does not give: articles that depend on gender, number and the next sound; adjectives
that agree, before or behind their noun; verbs in person and tense; prepositions that melt into articles; no subject
pronouns. Two kinds of word pairs are kept out of training: adjective with noun, and verb with the noun of its object.
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

# English, Italian by gender and number (m s, f s, m p, f p); the first line stands before its noun
_BEFORE = """
old vecchio vecchia vecchi vecchie|young giovane giovane giovani giovani|new nuovo nuova nuovi nuove
small piccolo piccola piccoli piccole|big grande grande grandi grandi|long lungo lunga lunghi lunghe
"""
_BEHIND = """
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
_PRONOUNS = ("I", "you", None, "we", "they")  # of five persons; the third is a noun's
# of and its like melt into the article; with and behind do not
_MELTING = {"of": ("de", "di"), "to": ("a", "a"), "from": ("da", "da"), "in": ("ne", "in"), "on": ("su", "su")}
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
        """Number of the agreeing form: m s, f s, m p, f p."""
        return 2 * plural + (self.gender == "f" or (self.gender == "mf" and plural))


class Phrase(NamedTuple):
    """A part of a sentence in both languages."""

    english: str
    italian: str  # a preposition that melts is not in it: `_with_preposition` adds it
    plural: bool
    form: int
    noun: str
    article: bool  # whether the Italian begins with a definite article


class Pair(NamedTuple):
    """A sentence in both languages, and the word pairs in it that may be kept out of training."""

    english: str
    italian: str
    used: frozenset[tuple[str, str]]


@cache
def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row.split()) for line in text.strip().splitlines() for row in line.split("|"))


@cache
def _nouns() -> dict[str, Noun]:
    return {row[0]: Noun(*row) for row in _rows(_NOUNS)}


def _hard(word: str) -> bool:
    """Whether a masculine word takes lo and gli: z, ps, gn, or s and a consonant."""
    return word.startswith(("z", "ps", "gn")) or (word[0] == "s" and word[1] not in _VOWELS)


def definite(word: str, form: int) -> str:
    """The definite article before a word, with its apostrophe or space."""
    if form == 0:
        return "l'" if word[0] in _VOWELS else "lo " if _hard(word) else "il "
    if form == 1:
        return "l'" if word[0] in _VOWELS else "la "
    if form == 2:
        return "gli " if word[0] in _VOWELS or _hard(word) else "i "
    return "le "


def indefinite(word: str, form: int) -> str:
    """The indefinite article before a word; in the plural, that of a part: dei, degli, delle."""
    if form == 0:
        return "uno " if _hard(word) else "un "
    if form == 1:
        return "un'" if word[0] in _VOWELS else "una "
    return melted("de", definite(word, form))


def melted(stem: str, article: str) -> str:
    """A preposition and a definite article as one word: del, dello, dell', della, dei, degli, delle."""
    if article == "il ":
        return f"{stem}l "
    if article == "i ":
        return f"{stem}i "
    return f"{stem}{article}" if article == "gli " else f"{stem}l{article}"


@dataclass
class _Speaker:
    """Says sentences at random."""

    rng: Random

    def sentence(self) -> Pair:
        make = self.rng.choices((self.acts, self.stands, self.is_so, self.where), (6, 3, 3, 1))[0]
        return make()

    def noun_phrase(self, used: set[tuple[str, str]], nouns: tuple[str, ...] | None = None) -> Phrase:
        """Determiner, at most one adjective, noun."""
        rng, noun = self.rng, _nouns()[self.rng.choice(nouns or tuple(_nouns()))]
        kind = rng.choices(("the", "a", "my", "this", "two"), (8, 4, 3, 2, 1))[0]
        plural = kind == "two" or rng.random() < 0.4
        form = noun.form(plural)
        english, italian = (noun.plural, noun.plurale) if plural else (noun.singular, noun.singolare)
        is_bare = rng.random() < 0.5
        if not is_bare:
            before = rng.random() < 0.4
            adjective = rng.choice(_rows(_BEFORE if before else _BEHIND))
            used.add((adjective[0], noun.singular))
            english = f"{adjective[0]} {english}"
            italian = f"{adjective[1 + form]} {italian}" if before else f"{italian} {adjective[1 + form]}"
        article = kind in ("the", "my")
        if kind == "the":
            english, italian = f"the {english}", definite(italian, form) + italian
        elif kind == "a":
            english = f"some {english}" if plural else f"{'an' if english[0] in 'aeiouI' else 'a'} {english}"
            italian = indefinite(italian, form) + italian
        elif kind == "my":
            whose = rng.choice(tuple(_POSSESSIVES))
            owned = f"{_POSSESSIVES[whose][form]} {italian}"
            article = not (noun.singular in _FAMILY and not plural and is_bare)
            english, italian = f"{whose} {english}", (definite(owned, form) if article else "") + owned
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
            italian = melted(_MELTING[english][0], article) + rest
        else:
            italian = f"{_MELTING[english][1]} {phrase.italian}"
        return f"{english} {phrase.english}", italian

    def subject(self, used: set[tuple[str, str]]) -> tuple[str, str, int, Phrase | None]:
        """(English, Italian and a space, person 0 to 4, noun phrase)."""
        person = self.rng.choices(range(5), (2, 2, 6, 2, 2))[0]
        if person != 2:
            return _PRONOUNS[person] or "", "", person, None
        phrase = self.noun_phrase(used, _PEOPLE)
        return phrase.english, f"{phrase.italian} ", 4 if phrase.plural else 2, phrase

    def acts(self) -> Pair:
        """Somebody does something to something."""
        used: set[tuple[str, str]] = set()
        verb = self.rng.choice(_rows(_VERBS))
        thing = self.noun_phrase(used)
        used.add((verb[0], thing.noun))
        more = ("", "")
        if self.rng.random() < 0.25:
            more = self.preposition(self.noun_phrase(used, _PEOPLE), self.rng.choice(("of", "for", "with")))
        return self._clause(verb, (thing.english, thing.italian), more, used)

    def stands(self) -> Pair:
        """Somebody does something somewhere."""
        used: set[tuple[str, str]] = set()
        where = self.preposition(self.noun_phrase(used, _PLACES), self.rng.choice(("in", "behind", "from", "to", "on")))
        return self._clause(self.rng.choice(_rows(_INTRANSITIVE)), where, ("", ""), used)

    def _clause(
        self, verb: tuple[str, ...], rest: tuple[str, str], more: tuple[str, str], used: set[tuple[str, str]]
    ) -> Pair:
        """Subject, verb in a tense, maybe not, maybe asked, and the rest."""
        who, chi, person, _ = self.subject(used)
        past, negated, asked = (self.rng.random() < p for p in (0.35, 0.25, 0.2))
        third = person == 2
        if asked or negated:
            auxiliary = "did" if past else "does" if third else "do"
            no = " not" if negated else ""
            said = f"{auxiliary} {who}{no} {verb[0]}" if asked else f"{who} {auxiliary}{no} {verb[0]}"
        else:
            said = f"{who} {verb[2] if past else verb[1] if third else verb[0]}"
        detto = f"{_HAVE[person]} {verb[8]}" if past else verb[3 + person]
        english = " ".join(filter(None, (said, rest[0], more[0])))
        italian = " ".join(filter(None, (f"{chi}{'non ' if negated else ''}{detto}", rest[1], more[1])))
        return _ended(english, italian, asked, used)

    def is_so(self) -> Pair:
        """Something is red."""
        used: set[tuple[str, str]] = set()
        thing = self.noun_phrase(used)
        adjective = self.rng.choice(_rows(_BEHIND))
        used.add((adjective[0], thing.noun))
        person, past, negated = 4 if thing.plural else 2, self.rng.random() < 0.4, self.rng.random() < 0.25
        asked = self.rng.random() < 0.2
        be, no = (_WAS if past else _AM)[person], " not" if negated else ""
        subject = f"{be} {thing.english}{no}" if asked else f"{thing.english} {be}{no}"
        essere = (_WAS_ITALIAN if past else _BE)[person]
        italian = f"{thing.italian} {'non ' if negated else ''}{essere} {adjective[1 + thing.form]}"
        return _ended(f"{subject} {adjective[0]}", italian, asked, used)

    def where(self) -> Pair:
        """Where something is."""
        used: set[tuple[str, str]] = set()
        thing = self.noun_phrase(used)
        english = f"where {'are' if thing.plural else 'is'} {thing.english}"
        return _ended(english, f"{'dove sono ' if thing.plural else 'dov’è '}{thing.italian}", True, used)


def _cut(italian: str) -> tuple[str, str]:
    """(definite article with what separates it, the rest)."""
    for article in ("l'", "lo ", "il ", "la ", "gli ", "i ", "le "):
        if italian.startswith(article):
            return article, italian[len(article) :]
    raise AssertionError(italian)


def _ended(english: str, italian: str, asked: bool, used: set[tuple[str, str]]) -> Pair:
    mark = "?" if asked else "."
    return Pair(f"{english}{mark}", f"{italian}{mark}".replace("’", "'"), frozenset(used))


def held_out_pairs(seed: int = 0) -> frozenset[tuple[str, str]]:
    """Adjective with noun, and verb with noun: a twentieth of all, which training never sees together."""
    nouns = tuple(_nouns())
    words = [row[0] for row in (*_rows(_BEFORE), *_rows(_BEHIND), *_rows(_VERBS))]
    every = [(word, noun) for word in words for noun in nouns]
    return frozenset(Random(seed).sample(every, len(every) // 20))


def sentences(seed: int) -> Iterator[Pair]:
    """Sentences without end, some of them more than once."""
    speaker = _Speaker(Random(seed))
    while True:
        yield speaker.sentence()


class Corpus(NamedTuple):
    """Pairs to train on, and two sets that training has not seen: new sentences, and new pairs of words."""

    train: list[Pair]
    unseen_sentences: list[Pair]
    unseen_pairs: list[Pair]


def make_corpus(train: int = 20_000, test: int = 500, seed: int = 0) -> Corpus:
    """All English sentences in it differ; only those of `unseen_pairs` have a pair of words that was held out."""
    out, seen, plain, other = held_out_pairs(seed), set(), [], []
    for pair in sentences(seed):
        if pair.english in seen:
            continue
        seen.add(pair.english)
        (other if pair.used & out else plain).append(pair)
        if len(plain) >= train + test and len(other) >= test:
            break
    return Corpus(plain[:train], plain[train : train + test], other[:test])
