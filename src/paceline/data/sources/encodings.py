"""Guess the encoding of text that is not UTF-8, for messages. Nothing is read with a guess.

Each candidate decodes the text strictly, and the decoded characters are rated: frequent characters
of a language, other letters in plausible positions, and characters that hardly occur in text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

#: Rating of characters: frequent, plausible, rare, and almost never in text.
_FREQUENT, _PLAUSIBLE, _RARE, _NEVER = 1.0, 0.3, -0.5, -1.0
#: A guess with a lower mean rating is not stated as one.
_MIN_RATING = 0.25
_SAMPLE_CHARS = 24
_TYPOGRAPHIC = set("\xa0“”„‘’‚–—…«»‹›€°§£·•")

_SIMPLIFIED = set(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年"
    "过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心"
    "她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间"
    "由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给"
    "世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变"
)
_TRADITIONAL = set(
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年"
    "過發後作里用道行所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心"
    "她本前開但因只從想實日軍者意無力它與長把機十民第公此已工使情明性知全三又關點正業外將兩高間"
    "由問很最重並物手應戰向頭文體政美相見被利什二等產或新己制身果加西斯月話合回特代內信表化老給"
)
_HANGUL = set(
    "이다는에의을가고하지로한기사리스자나도서인라그어은를해아대으시정수일들과보있것게부제구장전비"
    "상여오만주마면조안니공원때유무소모신국치았었습세중실위요우습까미저경없년생명학문회말"
)
_KANJI = set(
    "日一国会人年大十二本中長出三同時政事自行社見月分議後前民生連五発間対上部東者党地合市業内相"
    "方四定今回新場金員九入選立開手米力学問高代明実円関決子動京全目表戦経通外最言氏現理調体化田"
    "当八六約主題下首意法語文書気天質答何物話安国私"
)
#: Letters of a script, the most frequent first.
_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъёіїєґ"
_GREEK = "αοιετσνηυρπκμλςίόάήέώύδγχθφβξζψϊ"
_LATIN = set("äöüßéèêàâçñíóúáôîûëïåøæœãõìòù")
_CENTRAL = set("ąćęłńóśźżáčďéěíňřšťúůýžőűäöüôľĺŕăîâşţșțđ")
_TURKISH = set("ışğüöçİâîû")
_HEBREW = "יוהלאמרתבשנעדחקכםןפגטצסזךץף"
_ARABIC = "اليمونترهبدعسفحكقةشجأىصخطضذزغثءئظؤإآ"
_CJK_MARKS = set("，。、？！：；（）《》「」『』“”‘’…—·　．～％")


@dataclass(frozen=True)
class Guess:
    """An encoding that a text may have.

    Args:
        name: name of the encoding for `iconv`.
        sample: some of the text as decoded with it.
        rating: mean rating of its characters that are not ASCII.
        num_rated: number of these characters.
    """

    name: str
    sample: str
    rating: float
    num_rated: int

    @property
    def is_likely(self) -> bool:
        return self.rating >= _MIN_RATING


def guess_encodings(raw: bytes) -> list[Guess]:
    """Return the encodings with which the bytes can be decoded, the likeliest first."""
    guesses = []
    for name, rate in _CANDIDATES.items():
        try:
            text = codecs.getincrementaldecoder(name)("strict").decode(raw)
        except UnicodeDecodeError:
            continue
        places = [place for place, character in enumerate(text) if ord(character) > 127]
        if places:
            rating = sum(rate(text, place) for place in places) / len(places)
            start = max(0, places[0] - _SAMPLE_CHARS // 4)
            sample = " ".join(text[start : start + _SAMPLE_CHARS].split())
            guesses.append(Guess(name.upper(), sample, rating, len(places)))
    return sorted(guesses, key=lambda guess: -guess.rating)


def is_mostly_utf8(raw: bytes) -> bool:
    """Return whether most characters that are not ASCII are valid UTF-8."""
    text = raw.decode("utf-8", errors="replace")
    num_invalid = text.count("\ufffd")
    return sum(character > "\x7f" for character in text) - num_invalid > 4 * num_invalid


def _rate_chinese(frequent: set[str], encoding: str, common: range) -> Callable[[str, int], float]:
    def rate(text: str, place: int) -> float:
        character = text[place]
        if character in frequent or character in _CJK_MARKS:
            return _FREQUENT
        if not "\u4e00" <= character <= "\u9fff":
            return _NEVER if character not in _TYPOGRAPHIC else _PLAUSIBLE
        try:
            return _PLAUSIBLE if character.encode(encoding)[0] in common else _RARE
        except UnicodeEncodeError:
            return _NEVER

    return rate


def _rate_japanese(text: str, place: int) -> float:
    character = text[place]
    if "\u3041" <= character <= "\u30ff" or character in _CJK_MARKS:
        return _FREQUENT
    if character in _KANJI:
        return _FREQUENT
    if "\u4e00" <= character <= "\u9fff":
        return _PLAUSIBLE
    return _NEVER if "\uff61" <= character <= "\uff9f" else _RARE


def _rate_korean(text: str, place: int) -> float:
    character = text[place]
    if character in _HANGUL:
        return _FREQUENT
    if "\uac00" <= character <= "\ud7a3":
        # The syllables of KS X 1001; the others were added for completeness and are rare.
        return _PLAUSIBLE if min(character.encode("cp949")) >= 0xA1 else _NEVER
    return _PLAUSIBLE if character in _CJK_MARKS else _NEVER


def _rate_script(letters: str, first: str, last: str) -> Callable[[str, int], float]:
    """Return the rating of a script whose words have no ASCII letters."""
    ratings = {letter: 1 - place / len(letters) for place, letter in enumerate(letters)}

    def rate(text: str, place: int) -> float:
        character, before, after = text[place], text[place - 1 : place], text[place + 1 : place + 2]
        if not first <= character <= last:
            return 0.0 if character in _TYPOGRAPHIC else _NEVER
        if any(each.isascii() and each.isalpha() for each in (before, after)):
            return _NEVER
        if character.isupper() and before.islower():
            return _NEVER
        return ratings.get(character.lower(), _RARE)

    return rate


def _rate_latin(frequent: set[str]) -> Callable[[str, int], float]:
    """Return the rating of a language with single letters that are not ASCII, within words."""

    def rate(text: str, place: int) -> float:
        character, before, after = text[place], text[place - 1 : place], text[place + 1 : place + 2]
        if not character.isalpha():
            if character in "¿¡":
                return _FREQUENT
            is_inside = before.isalpha() and after.isalpha() and character not in "’·"
            return _NEVER if is_inside or character not in _TYPOGRAPHIC else _PLAUSIBLE
        letters = _letters_at(text, place)
        has_ascii = any(map(str.isascii, letters))
        if (character.isupper() and before.islower()) or (len(letters) > 1 and not has_ascii):
            return _NEVER
        return _FREQUENT if character.lower() in frequent else _RARE

    return rate


def _letters_at(text: str, place: int) -> str:
    """Return the letters around a place."""
    start = end = place
    while start and text[start - 1].isalpha():
        start -= 1
    while end < len(text) and text[end].isalpha():
        end += 1
    return text[start:end]


#: The ratings of the candidates, with the names of their codecs. Of equal ones, the first is used.
_CANDIDATES: dict[str, Callable[[str, int], float]] = {
    "gb18030": _rate_chinese(_SIMPLIFIED, "gb2312", range(0xB0, 0xD8)),
    "big5": _rate_chinese(_TRADITIONAL, "big5", range(0xA4, 0xC7)),
    "cp932": _rate_japanese,
    "euc-jp": _rate_japanese,
    "cp949": _rate_korean,
    "cp1252": _rate_latin(_LATIN),
    "cp1254": _rate_latin(_TURKISH),
    "cp1250": _rate_latin(_CENTRAL),
    "iso8859-1": _rate_latin(_LATIN),
    "iso8859-2": _rate_latin(_CENTRAL),
    "cp1251": _rate_script(_CYRILLIC, "\u0400", "\u045f"),
    "koi8-r": _rate_script(_CYRILLIC, "\u0400", "\u045f"),
    "cp866": _rate_script(_CYRILLIC, "\u0400", "\u045f"),
    "cp1253": _rate_script(_GREEK, "\u0370", "\u03ff"),
    "cp1255": _rate_script(_HEBREW, "\u05b0", "\u05ea"),
    "cp1256": _rate_script(_ARABIC, "\u0600", "\u06ff"),
}
