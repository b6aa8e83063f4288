"""The generated families: worlds, splits, demonstrations that agree with the environment, tokenizer."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections import Counter

import pytest

from brace_rl.errors import ConfigError
from brace_rl.tasks.search.facts import Chain, make_questions, make_world, names, split_of
from brace_rl.tasks.search.search_facts import SearchFactsTask
from brace_rl.tasks.search.settings import SearchFactsSettings, WebFactsSettings
from brace_rl.tasks.search.web_facts import RECORD, RUMOUR, WebFactsTask

SIZES = {"train_problems": 300, "eval_problems": 60, "people": 30, "worlds": 3}
TASKS = {
    "search_facts": lambda seed=0, **more: SearchFactsTask(SearchFactsSettings(**{**SIZES, **more}), seed=seed),
    "web_facts": lambda seed=0, **more: WebFactsTask(WebFactsSettings(**{**SIZES, **more}), seed=seed),
}
both = pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)


def demonstrations(task, count, **more):
    return list(itertools.islice(task.demonstrations(5, **more), count))


def replay(task, transcript):
    """Steps through a transcript with the policy's text as it is decoded; every observation must agree."""
    tokenizer = task.build_tokenizer()

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    async def steps():
        environment = pickle.loads(pickle.dumps(task.environment(transcript.problem)))
        pieces = [*transcript.pieces]
        for turn, told in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            assert turn.is_policy
            assert tokenizer.unk_token_id not in ids(turn.text)
            result = await environment.step(tokenizer.decode(ids(turn.text)))
            if told is not None:
                assert not told.is_policy
                assert ids(result.observation + result.observation_end) == ids(told.text)
                assert tokenizer.unk_token_id not in ids(told.text)
        return result

    return asyncio.run(steps())


# Worlds


def test_everybody_has_different_people_for_his_relations_and_is_each_of_them_once():
    world = make_world(people=20, relations=8, key="x")
    for relation in world.facts.values():
        assert sorted(relation) == sorted(relation.values()) == sorted(world.people)
    for person in world.people:
        assert len({person, *(relation[person] for relation in world.facts.values())}) == 9


def test_a_world_depends_on_its_key_alone():
    assert make_world(people=30, relations=3, key="x") == make_world(people=30, relations=3, key="x")
    assert make_world(people=30, relations=3, key="x") != make_world(people=30, relations=3, key="y")
    assert len(set(names())) == len(names())


def test_a_question_follows_its_path():
    world = make_world(people=20, relations=3, key="x")
    chain = Chain("ann", ("boss", "friend"))
    assert chain.text == "ann 's boss 's friend ?"
    start = world.people[0]
    boss = world.facts["boss"][start]
    assert world.visited(Chain(start, ("boss", "friend"))) == [start, boss, world.facts["friend"][boss]]


def test_questions_are_different_and_of_their_split():
    people, relations = names()[:30], ("boss", "friend", "mother", "doctor")
    texts = {}
    for split, count in (("train", 400), ("dev", 50), ("test", 50)):
        chains = make_questions(people=people, relations=relations, split=split, hops=(2, 3), count=count, key="k")
        texts[split] = {chain.text for chain in chains}
        assert len(texts[split]) == count
        assert {split_of(text) for text in texts[split]} == {split}
        assert all(len(set(chain.path)) == len(chain.path) in (2, 3) for chain in chains)
    assert not (texts["train"] & texts["dev"] | texts["dev"] & texts["test"] | texts["train"] & texts["test"])


def test_more_questions_than_there_are_is_refused():
    with pytest.raises(
        ConfigError, match=r"task\.eval_problems: .* admit only about \d+ different dev questions, not 999"
    ):
        TASKS["search_facts"](
            eval_problems=999, people=20, relations=3, hops=(1, 1), eval_split="dev", train_problems=9
        )


# Tasks


@both
def test_held_out_problems_are_the_same_for_every_seed_and_in_no_other_split(make):
    zero, one, dev = make(), make(seed=1), make(eval_split="dev")
    assert zero.eval_problems() == one.eval_problems()
    assert zero.train_problems() != one.train_problems()
    prompts = [{problem.prompt for problem in problems} for problems in (zero.train_problems(), zero.eval_problems())]
    prompts.append({problem.prompt for problem in dev.eval_problems()})
    assert not (prompts[0] & prompts[1] | prompts[1] & prompts[2] | prompts[0] & prompts[2])
    everything = [*zero.train_problems(), *zero.eval_problems()]
    assert len({problem.id for problem in everything}) == 360


@both
def test_training_worlds_contradict_each_other_and_share_no_world_with_what_is_held_out(make):
    task = make()
    assert len({problem.metadata["world"] for problem in task.train_problems()}) == 3
    assert {problem.metadata["world"] for problem in task.eval_problems()} == {"test"}
    facts = [world.facts["boss"] for world in task._worlds.values()]
    assert all(first != second for first, second in itertools.combinations(facts, 2))


@both
def test_problems_survive_a_checkpoint(make):
    for problem in make().train_problems()[:3]:
        assert json.loads(json.dumps(problem.metadata))["world"] == problem.metadata["world"]


@both
def test_demonstrations_agree_with_the_environment_and_are_right(make):
    task = pickle.loads(pickle.dumps(make()))
    for transcript in demonstrations(task, 25):
        result = replay(task, transcript)
        assert (result.done, result.success, result.reward) == (True, True, 1.0)
        assert result.info["tool_errors"] == 0


@both
def test_demonstrations_with_a_mistake_are_wrong_and_agree_with_the_environment_too(make):
    task = make()
    for transcript in demonstrations(task, 25, mistakes=0.999_999):
        result = replay(task, transcript)
        assert (result.done, result.success, result.reward) == (True, False, 0.0)


@both
def test_the_share_of_mistakes_is_the_one_asked_for(make):
    task = make()
    wrong = [
        t.pieces[-1].text != f"<answer>{t.problem.answer}</answer>" for t in demonstrations(task, 400, mistakes=0.3)
    ]
    assert 0.2 < sum(wrong) / 400 < 0.4


@both
def test_demonstrations_depend_on_the_seed_alone_and_are_of_training_problems(make):
    assert demonstrations(make(), 5, mistakes=0.5) == demonstrations(make(), 5, mistakes=0.5)
    known = {problem.id for problem in make().train_problems()}
    assert {transcript.problem.id for transcript in demonstrations(make(), 20)} <= known


@both
def test_the_tokenizer_gives_every_prompt_and_tag_back(make):
    task = make()
    tokenizer = task.build_tokenizer()
    for problem in [*task.train_problems(), *task.eval_problems()]:
        ids = task.prompt_ids(problem, tokenizer)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == problem.prompt
    for stop in task.stop:
        assert len(tokenizer.encode(stop, add_special_tokens=False)) == 1
    assert tokenizer.get_vocab() == make(seed=7).build_tokenizer().get_vocab()


def test_a_search_for_a_fact_finds_it_and_its_decoy_first():
    task = TASKS["search_facts"]()
    for key, world in task._worlds.items():
        person, other = world.people[0], world.facts["boss"][world.people[0]]
        (whose,) = [somebody for somebody, boss in world.facts["boss"].items() if boss == person]
        found = {document.text for document in task._retrievers[key].find(f"{person} boss", 2)}
        assert found == {f"{person} boss {other}", f"{whose} boss {person}"}


def test_a_search_for_a_fact_finds_record_and_rumour_first_and_they_disagree():
    task = TASKS["web_facts"]()
    orders = Counter()
    for key, world in task._worlds.items():
        for person in world.people:
            pages = task._retrievers[key].find(f"{person} boss", 2)
            assert [page.title for page in pages] == [f"{person} boss"] * 2
            kinds = tuple(page.text.split()[2] for page in pages)
            assert set(kinds) == {RECORD, RUMOUR}
            orders[kinds] += 1
            record, rumour = (pages[kinds.index(kind)].text.split()[-1] for kind in (RECORD, RUMOUR))
            assert record == world.facts["boss"][person]
            agree = record == rumour
            orders["agree"] += agree
    assert orders.pop("agree") < 20  # a rumour may be true by chance
    assert min(orders.values()) > 20  # the record is not simply the first


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hops": (2, 5)}, "task.hops: needs 1 <= fewest <= most < task.relations"),
        ({"hops": (3, 2)}, "task.hops"),
        ({"hops": (2, 3), "max_turns": 3}, "task.max_turns: a question with 3 relations takes 4 turns"),
        ({"data": "x.jsonl"}, "task.data: the search_facts generates its problems"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        SearchFactsSettings(**settings)


def test_two_pages_need_two_calls():
    with pytest.raises(ConfigError, match=r"task\.max_calls_per_turn"):
        TASKS["web_facts"](max_calls_per_turn=1)
