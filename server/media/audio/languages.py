"""The languages of speech recognizers: ISO 639 codes and English names."""

from __future__ import annotations

_TABLE = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish
pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese
he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian
th thai ur urdu hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak
te telugu fa persian lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian
mk macedonian br breton eu basque is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh
sq albanian sw swahili gl galician mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali
af afrikaans oc occitan ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao
uz uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish
my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir
jw javanese su sundanese yue cantonese fil filipino
"""
_WORDS = _TABLE.split()
NAMES = {code: name.replace("_", " ") for code, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
_SAME = {"jv": "jw", "iw": "he", "in": "id", "nb": "no", "cmn": "zh"}  # other codes of these languages
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "km", "bo", "yue"})


def gap(code: str | None) -> str:
    """Return the separator between the texts of two pieces: "" in languages without spaces."""
    return "" if code in _UNSPACED else " "


def code_of(name: str) -> str:
    """Return the code of a language given by its code, also with a region (en-US, zh_CN), or its English name, in any
    case; `name` itself if it is unknown.
    """
    name = name.strip().lower()
    code = name.replace("_", "-").partition("-")[0]
    code = _SAME.get(code, code)
    return code if code in NAMES else next((one for one, known in NAMES.items() if known == name), name)


def asked_code(name: str | None) -> str | None:
    """Return the code of the language that a client asks for; None, also for "" and "auto", if it is to be detected."""
    return code_of(name) if name and name.strip().lower() not in ("", "auto") else None
