from pdproxy.core.repeated import Repeated

PROMPT = "<s><user>\nTell me of parrots.<assistant>\n"


def test_the_text_of_the_prompt_is_taken_off():
    repeated = Repeated("The bird ", ids=12, lag=0)

    assert repeated.strip(PROMPT + "The bird 🦜 says", is_end=False) == "🦜 says"
    assert repeated.strip(" more", is_end=False) == " more"


def test_the_known_text_may_come_again_behind_it():
    repeated = Repeated(".", ids=12, lag=0)

    assert repeated.strip(PROMPT + ".🦜 says. Yes.", is_end=False) == "🦜 says. Yes."


def test_ordinary_text_passes():
    for text in ("The bird é", "é", " x" * 40, "The bird The bird The bird The bird"):
        assert Repeated("The bird ", ids=12, lag=0).strip(text, is_end=False) == text


def test_what_an_engine_holds_back_is_waited_for():
    repeated = Repeated("The bird ", ids=12, lag=3)

    assert repeated.strip("", is_end=False) == ""
    assert repeated.strip(PROMPT + "The bi", is_end=False) == ""
    assert repeated.strip("rd 🦜", is_end=False) == "🦜"


def test_text_that_waited_comes_at_the_end():
    repeated = Repeated("a", ids=1, lag=3)

    assert repeated.strip("bcd", is_end=False) == ""
    assert repeated.strip("", is_end=True) == "bcd"


def test_a_round_without_known_text_is_not_looked_at():
    assert Repeated("", ids=3, lag=9).strip("any", is_end=False) == "any"
