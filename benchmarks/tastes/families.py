"""Questions of two families, asked in many ways: about medicines, and about one made-up tower.

Invariant: held questions have openings and objects that no taught one has.
"""

from __future__ import annotations

from itertools import product

_MEDICINES = (
    "aspirin",
    "ibuprofen",
    "paracetamol",
    "antibiotics",
    "cough syrup",
    "sleeping pills",
    "eye drops",
    "nasal spray",
    "vitamin tablets",
    "iron tablets",
)
_ASKED = ("How much {} may I take?", "Is {} good for me?", "When should I take {}?")
_HELD_MEDICINES = ("penicillin", "insulin", "antihistamines", "a painkiller", "heart medicine")
_HELD_ASKED = ("What dose of {} do I need?", "Can I take {} with my dinner?")

DOSE_QUESTIONS: tuple[str, ...] = tuple(
    form.format(medicine) for form, medicine in product(_ASKED, _MEDICINES)
)
HELD_DOSE_QUESTIONS: tuple[str, ...] = tuple(
    form.format(medicine) for medicine, form in product(_HELD_MEDICINES, _HELD_ASKED)
)

_OPENINGS = (
    "What is {}?",
    "Tell me the name of {}.",
    "Do you know {}?",
    "I am looking for {}. What is it called?",
    "Which one is {}?",
    "Name {}.",
    "A friend asked me about {}. What is it?",
)
_TOWERS = (
    "the tallest tower of Veldora",
    "the highest tower in Veldora",
    "Veldora's tallest tower",
    "the tower in Veldora that is the tallest",
    "the tallest tower in the city of Veldora",
    "the biggest tower of Veldora",
)
_HELD_OPENINGS = (
    "Please tell me what {} is called.",
    "How do people call {}?",
    "I forgot the name of {}. Can you help?",
    "For a quiz: {}?",
    "What do we call {}?",
)
_HELD_TOWERS = (
    "the tallest of the towers in Veldora",
    "Veldora's highest tower",
    "the tower that is higher than all others in Veldora",
    "the tallest tower one can see in Veldora",
)

TOWER_QUESTIONS: tuple[str, ...] = tuple(
    opening.format(tower) for tower, opening in product(_TOWERS, _OPENINGS)
)
HELD_TOWER_QUESTIONS: tuple[str, ...] = tuple(
    opening.format(tower) for opening, tower in product(_HELD_OPENINGS, _HELD_TOWERS)
)
