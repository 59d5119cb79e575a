"""Word lists of our own: the small words of English, and those that make a question wide.

Knows words only. Invariant: all are in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _forms(text: str) -> Mapping[str, str]:
    pairs = [pair.partition(":") for pair in text.split()]
    return MappingProxyType({form: lemma for form, _, lemma in pairs})


DETERMINERS = _words(
    "a an the this that these those my your his her its our their some any no every each either"
    " neither another both all what which whose many much few several more most less other such"
)
PRONOUNS = _words(
    "i you he she it we they me him us them who whom someone somebody something anyone anybody"
    " anything everyone everybody everything nobody nothing one myself yourself itself themselves"
    " there here"
)
AUXILIARIES = _words(
    "am is are was were be been being do does did have has had can could will would shall should"
    " may might must ought cannot won't can't don't doesn't didn't isn't aren't wasn't weren't"
    " haven't hasn't hadn't couldn't wouldn't shouldn't i'm you're we're they're it's he's she's"
    " that's there's what's who's how's where's let's i'd you'd i've you've we've they've i'll"
    " you'll"
)
PREPOSITIONS = _words(
    "in on at by with from to into onto about above across after against along among around before"
    " behind below beneath beside between beyond during for inside near off out outside over past"
    " since through throughout toward towards under until up upon within without via per despite"
    " except of as"
)
NEVER_FREE = _words("of to as")
"""Prepositions whose phrases belong to the word before them."""

CONJUNCTIONS = _words("and or but nor so yet because although though while if unless whereas than")
"""Joins that begin something new; `and` and `or` join equals."""

MODALS = _words("to can could will would shall should may might must do does did don't let's")
"""After these a verb comes."""

SUBJECTS = _words("i you he she it we they who")
"""Between these and a verb nothing has to stand."""

VAGUE = _words(
    "about history art science culture society nature life world people thing stuff something"
    " anything everything someone somehow somewhere whatever some many several various lot bunch"
    " kind sort type way aspect topic subject issue matter area field general overview summary"
    " information detail idea concept notion view opinion thought philosophy politics religion"
    " economy technology education music love happiness success future past meaning impact effect"
    " influence role importance problem situation experience stuff etc generally usually often"
    " sometimes maybe perhaps probably possibly roughly approximately fairly quite rather somewhat"
    " good better best bad nice great interesting important different certain other more most"
    " tell talk discuss describe explain know mean"
)
"""Lemmas of broad ideas and general words (RT-LM, listing 1)."""

OPEN_WORDS = _words(
    "why how explain describe discuss compare contrast elaborate analyze analyse evaluate outline"
    " summarize summarise write create compose design develop generate brainstorm imagine suggest"
    " recommend advise propose draft story essay poem article blog report letter plan tutorial"
    " guide cause consequence effect impact implication reason benefit advantage disadvantage"
    " difference similarity relationship role significance importance challenge strategy step tip"
    " way idea example opinion think feel believe history meaning future"
)
"""Lemmas that ask for context, background or explanations."""

NUMBERED = _words("many much old long far tall big often fast high large deep heavy soon")
"""After `how`, these ask for one fact."""

CLOSED_WORDS = _words("when where who whom which whose yes no true false name")
"""These ask for one fact."""

COPULAS = _words("is are was were do does did can could will would has have had should am")
"""A question that begins with one of these asks for yes or no."""

LISTING = _words(
    "also additionally then furthermore moreover plus besides firstly secondly finally"
)
"""These begin a further part."""

IRREGULAR: Mapping[str, str] = _forms(
    "men:man women:woman children:child feet:foot teeth:tooth mice:mouse geese:goose"
    " lives:life wives:wife knives:knife leaves:leaf people:person saw:see seen:see went:go"
    " gone:go came:come took:take taken:take made:make got:get gotten:get gave:give given:give"
    " found:find told:tell thought:think knew:know known:know felt:feel left:leave kept:keep"
    " began:begin begun:begin brought:bring wrote:write written:write stood:stand heard:hear"
    " meant:mean met:meet ran:run paid:pay sat:sit spoke:speak spoken:speak led:lead grew:grow"
    " grown:grow lost:lose fell:fall fallen:fall sent:send built:build spent:spend won:win"
    " taught:teach bought:buy caught:catch chose:choose chosen:choose drew:draw drawn:draw"
    " drove:drive driven:drive ate:eat eaten:eat flew:fly flown:fly forgot:forget held:hold"
    " hung:hang hid:hide laid:lay lay:lie rode:ride rose:rise risen:rise sang:sing sung:sing"
    " slept:sleep sold:sell shot:shoot showed:show shown:show stole:steal stolen:steal"
    " swam:swim threw:throw thrown:throw understood:understand woke:wake wore:wear worn:wear"
    " broke:break broken:break became:become fought:fight dealt:deal bore:bear born:bear"
    " said:say criteria:criterion phenomena:phenomenon analyses:analysis crises:crisis"
)
"""Forms that no ending explains, with their lemmas."""
