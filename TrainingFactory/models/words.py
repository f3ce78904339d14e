"""Words that are single tokens of the built-in model, with and without a leading space. Environments build their tasks
from these words, so that a model of half a million parameters can copy a name by sampling one token."""

NAMES = tuple(
    """Ada Amir Anna Boris Carla Chen Clara David Dora Edgar Elena Emma Felix Fiona Frank Greta Hanna Henry Ines
    Ivan Jamal Jonas Julia Karim Laura Leon Lina Lucas Maria Marta Milan Nadia Nina Omar Oscar Paula Pedro Rosa Ruth
    Samir Sara Simon Sofia Tara Theo Tomas Vera Viktor Wanda Yusuf""".split()
)

PLACES = tuple(
    """Accra Athens Berlin Bogota Boston Cairo Dakar Delhi Denver Dublin Geneva Hanoi Havana Jakarta Kyoto Lagos
    Lima Lisbon London Madrid Manila Miami Milano Moscow Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito
    Rabat Riga Rome Santiago Seoul Sofiya Sydney Tokyo Toronto Tunis Turin Vienna Warsaw Zagreb Zurich""".split()
)

THINGS = tuple(
    """apple arrow barrel basket bell bottle bread bridge bronze candle carpet cedar cheese clock cloud coffee
    copper cotton crown drum eagle feather flute garden ginger glass gold hammer honey iron ivory jade lamp lemon
    linen marble mirror olive orange paper pearl pepper piano river rope saddle salt silk silver stone sugar tower
    violin wool""".split()
)

# other words in the sentences of the built-in environments
SENTENCE_WORDS = tuple(
    """Calculate Find Nothing Search Where answer calculator expression fact facts found is it lives number of one
    query search sold the then to with word""".split()
)
