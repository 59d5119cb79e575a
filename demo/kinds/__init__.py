"""The kinds of request, one module per subject; `ALL` is the whole list.

A kind is a function from a random generator to a request that carries the function's name.
`FIXED` names the kinds with so few phrasings that none can be kept from training.
`HARD` names those that take the network many more examples than a table look-up does.
"""

from demo.kinds import advice, facts, letters, limits, numbers, social, writing
from demo.request import Kind

ALL: tuple[Kind, ...] = (
    *numbers.KINDS,
    *letters.KINDS,
    *facts.KINDS,
    *writing.KINDS,
    *advice.KINDS,
    *social.KINDS,
    *limits.KINDS,
)
FIXED: frozenset[str] = frozenset(
    ("impossible", "untold", "vague", "list_calendar", *(kind.__name__ for kind in social.KINDS))
)
HARD: frozenset[str] = frozenset(
    ("add", "subtract", "multiply", "compare", "double_half", "count_up", "count_by", "count_down",
     "count_between", "repeat", "reverse",
     "spell", "uppercase", "first_letter", "count_letters", "count_words", "last_word", "yes_no",
     "true_false", "bigger")
)  # fmt: skip
