from __future__ import annotations

import pytest

from tests.rewards.test_rewards_numbers import same
from TrainingFactory.rewards.rules.units import UNITS


def test_units():
    assert same("1500 m", "1.5 km") and same("5 kilometres", "5 km") and same("50 cents", "$0.50")
    assert not same("5 miles", "5 km") and not same("5 kg", "5 km") and not same("€5", "$5")
    assert same("72 clips", "72") and same("5 km", "5") and same("5", "5 km")
    assert same("5 kg", "5 km", units=False)
    assert all(unit.factor > 0 for units in UNITS.values() for unit in units)


SAME = """
72 miles per hour = 72 mph | 72 miles an hour = 72 mi/h | 72 km per hour = 72 km/h
36 km/h = 10 meters per second | 25 degrees Celsius = 25°C | 25 degrees C = 25 °C | 25 degrees = 25°C
25℃ = 25 degrees | 5 pounds = £5 | 5 pounds = 5 lb | 72 square meters = 72 m^2 | 72 sq. km = 72 km²
1000 liters = 1 cubic meter | 9.8 m/s² = 9.8 meters per second^2 | $5 per hour = 5 dollars
5 dollars an hour = $5/hour | $2.5M = 2.5 million dollars | $72K = $72,000 | 5 hundred thousand = 500000
72 millions = 72000000 | 5千万 = 50000000 | 12 months = 1 year | 4 quarts = 1 gallon | 1000 MB = 1 GB
1024 MB = 1 GB | 1.5 kW = 1500 watts | 25 C = 25°C | 5 bucks = $5 | 5 gb = 5 GB | 3 working days = 3 days
3 days in all = 3 days
"""
DIFFERENT = """
72 miles per hour = 72 miles | 72 square meters = 72 m | 72 cubic meters = 72 m
72 sq km = 72 km | 72 m/s^2 = 72 m/s | 72 m^3 = 72 m^2 | 25°C = 25°F
25 degrees Celsius = 25 degrees Fahrenheit | £5 = 5 kg | 72 millions = 72 | 72 mn = 72 | 3 years = 3 days
3 months = 3 weeks | 12 years = 12 months | 1 gallon = 1 liter | 5 MB = 5 GB | 5 kW = 5 W | 5 mW = 5 MW
5 Mb = 5 MB | 25 F = 25 C | 5 laps = 5 km | 5 GHz. = 5 MHz | 5 kN = 5 kg
"""


def pairs(table: str, alike: bool) -> list[tuple[str, str, bool]]:
    found = (pair.partition(" = ") for line in table.strip().splitlines() for pair in line.split(" | "))
    return [(answer, reference, alike) for answer, _, reference in found]


@pytest.mark.parametrize(("answer", "reference", "alike"), pairs(SAME, True) + pairs(DIFFERENT, False))
def test_values_in_other_units(answer: str, reference: str, alike: bool):
    assert same(answer, reference) == same(reference, answer) == alike
