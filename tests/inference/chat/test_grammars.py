"""What may follow a prompt, in the format of each family: the grammar lets it through and the parser reads it."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import needs

needs("llguidance", "torch")

from reef.errors import InvalidRequest  # noqa: E402
from reef.inference.chat.formats import TOOL_FORMATS  # noqa: E402
from reef.inference.chat.grammars import CallGrammars  # noqa: E402
from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall  # noqa: E402
from reef.inference.chat.parser import OutputParser  # noqa: E402
from reef.inference.chat.pieces import Answer  # noqa: E402
from reef.inference.chat.service import ChatService  # noqa: E402
from reef.inference.chat.tokenizer import ChatTokenizer  # noqa: E402
from reef.inference.local.grammar import GrammarVocabulary, check_grammar  # noqa: E402
from reef.runtime.interfaces import Grammar  # noqa: E402
from tests.inference.chat.engines import FakeEngine  # noqa: E402
from tests.inference.chat.families import FAMILIES, VOCABULARY, end_of, tokenizer_of  # noqa: E402

F = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"$ref": "#/$defs/N", "type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"N": {"enum": [3, 30]}},
    },
)
NOW = Tool(name="get-time", parameters={"type": "object", "additionalProperties": False})
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
HELLO = Message(role="user", content="Hi")


def conversation(**fields) -> Conversation:
    return Conversation(messages=[HELLO], tools=[F, NOW], **fields)


def prompt_of(name: str, asked: Conversation, run):
    return run(ChatService(tokenizer_of(name), FakeEngine(tokenizer_of(name)))._prompts.build("", asked))


class Case:
    """One family's grammar, compiled, and its parser."""

    def __init__(self, name: str, asked: Conversation, run) -> None:
        self.tokenizer, self.asked = tokenizer_of(name), asked
        self.form = self.tokenizer.format
        self.prompt = prompt_of(name, asked, run)
        self.end = end_of(name)
        self.state = GrammarVocabulary(self.tokenizer, VOCABULARY, [self.end]).compile(self.prompt.grammar)

    def accepts(self, text: str) -> bool:
        """Whether it may be written after the lead, and the answer end there."""
        state = self.state.copy()
        ids = self.tokenizer.encode_now(text, goes_on=True)
        for token_id in ids:
            if not state.allowed()[token_id]:
                return False
            state.accept(token_id)
        return state.finished or bool(state.allowed()[self.end])

    def read(self, text: str) -> Answer:
        parser = OutputParser(
            self.form.table(with_tools=True), {tool.name: tool.parameters for tool in self.asked.tools},
            start="reasoning" if self.prompt.starts_reasoning else "",
        )  # fmt: skip
        answer = Answer()
        answer.add([*parser.push(self.prompt.lead), *parser.push(text), *parser.finish()])
        return answer


def arguments_of(name: str, given: dict) -> str:
    if name != "qwen-coder":
        return json.dumps(given, ensure_ascii=False)
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())


def row(name: str, calls: list[tuple[str, dict]]) -> str:
    """Calls as the family writes them."""
    form = tokenizer_of(name).format.tools
    written = [
        form.call.format(name=tool, quoted=json.dumps(tool)) + arguments_of(name, given) + form.close
        for tool, given in calls
    ]
    return form.begin + (form.between or "").join(written) + form.end


@pytest.fixture(scope="module", params=FAMILIES)
def either(request):
    """The family's name, and a request for JSON or calls."""
    import asyncio

    asked = conversation(grammar=Grammar("json_schema", json.dumps(ANSWER)))
    return request.param, Case(request.param, asked, asyncio.run)


texts = st.text(alphabet='x{}[]":,\\ \né<｜', max_size=6)
numbers = st.sampled_from([{}, {"n": 3}, {"n": 30}])
calls = st.lists(
    st.builds(lambda a, n: ("f", {"a": a, **n}), texts, numbers) | st.just(("get-time", {})), min_size=1, max_size=3
)


def test_calls_may_take_the_place_of_the_answer_and_are_read_as_calls(either):
    name, tested = either

    @given(calls)
    @settings(max_examples=25)
    def check(said):
        said = said[: 1 if tested.form.tools.between is None else 3]
        text = row(name, said)
        assert tested.accepts(text), text
        answer = tested.read(text)
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == said
        assert answer.text.strip() == ""

    check()


def test_the_answer_may_stand_in_their_place(either):
    name, tested = either
    begin = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    assert tested.accepts(begin + '{"ok": true}') and tested.read(begin + '{"ok": true}').text == '{"ok": true}'
    for wrong in ('{"ok": 1}', "yes", row(name, [("other", {})]), row(name, [("f", {"b": "x"})])):
        assert not tested.accepts(begin + wrong) and not tested.accepts(wrong), wrong
    assert not tested.accepts(row(name, [("f", {"a": "x", "n": 4})]))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_tells_of_the_tools_and_writes_calls_as_they_are_read(name):
    tokenizer = tokenizer_of(name)
    asked = tokenizer.template.render([HELLO], [F, NOW])
    assert '"f"' in asked and '"get-time"' in asked and tokenizer.template.knows_tools
    assert tokenizer.format.tools is TOOL_FORMATS[name], "it tells the format, too"
    said = [("f", {"a": "x} é", "n": 3}), ("get-time", {})][: 1 if name == "gpt-oss" else 2]
    turn = Message(
        role="assistant", content="", tool_calls=[ToolCall("call_1", tool, json.dumps(given)) for tool, given in said]
    )
    whole = tokenizer.template.render([HELLO, turn], [F, NOW], ask=False)
    before = asked if whole.startswith(asked) else tokenizer.template.render([HELLO], [F, NOW], ask=False)
    said_so = whole.removeprefix(before).rstrip().removesuffix(FAMILIES[name].special.split()[0])
    answer = Answer()
    parser = OutputParser(tokenizer.format.table(with_tools=True), {"f": F.parameters, "get-time": NOW.parameters})
    answer.add([*parser.push(said_so), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == said


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tool", ["f", None])
def test_what_is_forced_is_a_call(name, tool, run):
    tested = Case(name, conversation(tool_choice="required", tool_name=tool), run)
    form = tested.form.tools
    text = row(name, [("f", {"a": "x", "n": 30})]).removeprefix(tested.prompt.lead.removeprefix("\n</think>\n\n"))
    if tested.prompt.grammar.kind == "json_schema":
        text = text.removesuffix(form.close + form.end) + ("}" if tool is None else "")
    assert tested.accepts(text), (tested.prompt.lead, text)
    call, *others = tested.read(text).tool_calls
    assert (call.name, json.loads(call.arguments), others) == ("f", {"a": "x", "n": 30}, [])
    assert not tested.accepts(text.replace("30", "31"))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_call_is_all_where_calls_may_not_be_parallel(name, parallel, run):
    asked = conversation(grammar=Grammar("json_object", ""), parallel_calls=parallel)
    many = tokenizer_of(name).format.tools.between is not None and parallel
    assert Case(name, asked, run).accepts(row(name, [("get-time", {})] * 2)) == many


def test_one_schema_says_which_object_names_any_tool(run):
    """References of a tool's parameters lead to where they stand now."""
    prompt = prompt_of("hermes", conversation(tool_choice="required"), run)
    schema = json.loads(prompt.grammar.value)
    jsonschema.validate({"name": "f", "arguments": {"a": "x", "n": 3}}, schema)
    for wrong in ({"name": "other", "arguments": {}}, {"name": "f", "arguments": {"a": "x", "n": 4}}, {"name": "f"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_parameters_in_xml_have_the_values_of_their_schemas(run):
    colour = Tool(
        name="paint",
        parameters={
            "properties": {
                "colour": {"type": "string", "enum": ["red", "blue"]},
                "deep": {"type": "boolean"},
                "x": True,
            },
            "required": ["colour", "x"],
        },
    )
    asked = Conversation(messages=[HELLO], tools=[colour], tool_choice="required", tool_name="paint")
    tested = Case("qwen-coder", asked, run)
    given = {"colour": "red", "deep": True, "x": "any\ntext"}
    text = arguments_of("qwen-coder", given) + "</function>\n</tool_call>"
    assert tested.accepts(text) and json.loads(tested.read(text).tool_calls[0].arguments) == given
    assert not tested.accepts(text.replace("red", "green")) and not tested.accepts(text.replace("true", "maybe"))


@pytest.mark.parametrize("name", ["qwen-coder", "llama", "gpt-oss"])
@pytest.mark.parametrize(
    "schema",
    [
        {"required": 5, "properties": {"a": {}}}, {"required": {"a": 1}, "properties": 5}, {"properties": {"a": 5}},
        {"properties": {"\ud800": {}}}, {"properties": {"\U0001f600\n\"": {"enum": ["é", "\U0001f600", "\x00"]}}},
        {"properties": {"a": {"enum": ["\ud800"]}}}, {"properties": {"a": {"type": ["string", 5]}}}, {"type": []},
        {"properties": {"a": {"type": "integer", "minimum": float("inf")}}}, {"$ref": "#/nowhere"}, {"$ref": 5},
        {"properties": {"": {"type": "boolean", "$ref": "#"}}}, {"$defs": 5, "properties": {"a": {"type": "wat"}}},
    ],
)  # fmt: skip
def test_whatever_a_schema_is_the_grammar_is_one_or_the_clients_fault(name, schema):
    tokenizer = tokenizer_of(name)
    made = CallGrammars(tokenizer.format.tools, {})
    tools = [Tool(name="f", parameters=schema), NOW]
    compiled = GrammarVocabulary(tokenizer, VOCABULARY, [end_of(name)]).compile
    answer = Grammar("json_schema", json.dumps({"$schema": "x", **schema}))
    for grammar in (
        made.forced(tools, parallel=True)[1],
        made.forced(tools[:1], parallel=True)[1],
        made.answer_or_calls(answer, tools, "", parallel=True),
    ):
        try:
            check_grammar(grammar, 10_000)
            compiled(grammar)
        except InvalidRequest as error:
            assert error.field == "sampling.grammar"


def test_no_grammar_wants_the_space_that_a_tokenizer_puts_before_everything():
    from tokenizers import normalizers, pre_tokenizers

    inner = copy.deepcopy(tokenizer_of("mistral")._tokenizer)
    inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    inner.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = ChatTokenizer(inner)
    (space, brace) = tokenizer.encode_now("{", goes_on=True)
    allowed = (
        GrammarVocabulary(tokenizer, VOCABULARY, [end_of("mistral")]).compile(Grammar("json_object", "")).allowed()
    )
    assert allowed[brace] and not allowed[space]


def test_special_tokens_are_not_spelled(run):
    """In text they would be other tokens, which no parser takes for markers."""
    grammar = prompt_of("mistral-args", conversation(tool_choice="required"), run).grammar
    (marker,) = tokenizer_of("mistral-args").encode_now("[ARGS]")
    assert f"<[{marker}]>" in grammar.value and "[ARGS]" not in grammar.value
    hermes = prompt_of("hermes", conversation(grammar=Grammar("json_object", "")), run).grammar
    (tag,) = tokenizer_of("hermes").encode_now("<tool_call>")  # not special, but SGLang's llguidance thinks so
    assert f"<[{tag}]>" in hermes.value and "<tool_call>" not in hermes.value
    plain = CallGrammars(tokenizer_of("mistral-args").format.tools, {})
    assert '"f[ARGS]"' in plain.forced([F, NOW], parallel=True)[1].value
