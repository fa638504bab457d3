"""Frameworks run their own loops of tools and objects, with the requests that they really send."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel

from tests.clients.conftest import NAME

DESCRIBE = "Write a JSON object with name Anna and age 31."
QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    name: str
    age: int


ANNA = Person(name="Anna", age=31)


class Weather:
    """A tool that remembers what it was asked."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the current weather in a city."""
        self.cities.append(city)
        return '{"temperature": 21, "sky": "sunny"}'


class TestLangChain:
    @pytest.fixture
    def model(self, url):
        langchain_openai = pytest.importorskip("langchain_openai")
        return langchain_openai.ChatOpenAI(model=NAME, base_url=url, api_key="unused", temperature=0, max_tokens=200)

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_with_structured_output(self, model, method):
        assert model.with_structured_output(Person, method=method).invoke(DESCRIBE) == ANNA

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", ["auto", "any", "get_weather"])
    def test_bind_tools(self, model, choice):
        bound = model.bind_tools([Weather().get_weather], tool_choice=choice)
        for answer in (bound.invoke(QUESTION), _sum(bound.stream(QUESTION))):
            assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"city": "Paris"})]

    @pytest.mark.slow
    def test_a_loop(self, model):
        from langchain_core.messages import HumanMessage, ToolMessage

        weather = Weather()
        bound = model.bind_tools([weather.get_weather])
        history = [HumanMessage(QUESTION)]
        history.append(bound.invoke(history))
        for call in history[-1].tool_calls:
            history.append(ToolMessage(weather.get_weather(**call["args"]), tool_call_id=call["id"]))
        assert weather.cities == ["Paris"] and "21" in bound.invoke(history).text


def _sum(chunks):
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


class TestLangChainResponses(TestLangChain):
    @pytest.fixture
    def model(self, url):
        langchain_openai = pytest.importorskip("langchain_openai")
        settings = {"base_url": url, "api_key": "unused", "temperature": 0, "max_tokens": 200}
        return langchain_openai.ChatOpenAI(model=NAME, use_responses_api=True, output_version="v0", **settings)


class TestInstructor:
    @pytest.fixture
    def client(self, url):
        instructor = pytest.importorskip("instructor")
        import openai

        return lambda mode: instructor.from_openai(
            openai.OpenAI(base_url=url, api_key="unused"), mode=instructor.Mode[mode]
        )

    @pytest.fixture
    def ask(self):
        messages = [{"role": "user", "content": DESCRIBE}]
        return {"model": NAME, "messages": messages, "max_retries": 0, "temperature": 0}

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"])
    @pytest.mark.filterwarnings("ignore:Mode.*is deprecated:DeprecationWarning")
    def test_modes(self, client, ask, mode):
        person = client(mode).create(response_model=Person, **ask)
        *_, last = client(mode).create_partial(response_model=Person, **ask)
        assert person.model_dump() == last.model_dump() == ANNA.model_dump()  # of a subclass

    @pytest.mark.slow
    def test_a_list_of_objects(self, client, ask):
        assert ANNA in list(client("JSON_SCHEMA").create_iterable(response_model=Person, **ask))


class TestPydanticAI:
    @pytest.fixture
    def model(self, url):
        pytest.importorskip("pydantic_ai")
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=url, api_key="unused"))

    @pytest.fixture
    def responses_model(self, url):
        pytest.importorskip("pydantic_ai")
        from pydantic_ai.models.openai import OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIResponsesModel(NAME, provider=OpenAIProvider(base_url=url, api_key="unused"))

    @pytest.mark.slow
    def test_responses(self, responses_model):
        from pydantic_ai import Agent, NativeOutput

        weather, settings = Weather(), {"temperature": 0}
        agent = Agent(responses_model, tools=[weather.get_weather], model_settings=settings)
        assert "21" in agent.run_sync(QUESTION).output and weather.cities == ["Paris"]
        agent = Agent(responses_model, output_type=NativeOutput(Person), model_settings=settings)
        assert agent.run_sync(DESCRIBE).output == ANNA

    @pytest.mark.parametrize("native", [False, True])
    def test_output_type(self, model, native):
        from pydantic_ai import Agent, NativeOutput

        output_type = NativeOutput(Person) if native else Person
        agent = Agent(model, output_type=output_type, model_settings={"temperature": 0})
        assert isinstance(agent.run_sync(DESCRIBE).output, Person)

    def test_a_loop(self, model):
        from pydantic_ai import Agent

        weather = Weather()
        agent = Agent(model, tools=[weather.get_weather], model_settings={"temperature": 0})
        assert "21" in agent.run_sync(QUESTION).output and weather.cities == ["Paris"]


class TestOpenAIAgents:
    @pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
    def model(self, url, request):
        agents = pytest.importorskip("agents")
        import openai

        agents.set_tracing_disabled(True)
        return getattr(agents, request.param)(NAME, openai.AsyncOpenAI(base_url=url, api_key="unused"))

    @pytest.mark.slow
    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_loop(self, model, streamed):
        from agents import Agent, ModelSettings, Runner, function_tool

        weather = Weather()

        @function_tool
        def get_weather(city: str) -> str:
            """Get the current weather in a city."""
            return weather.get_weather(city)

        agent = Agent("weather", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0))

        async def run() -> str:
            if not streamed:
                return (await Runner.run(agent, QUESTION)).final_output
            result = Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

        assert "21" in asyncio.run(run()) and weather.cities == ["Paris"]

    @pytest.mark.slow
    def test_output_type(self, model):
        from agents import Agent, ModelSettings, Runner

        settings = ModelSettings(temperature=0)
        agent = Agent("person", model=model, output_type=Person, model_settings=settings)
        assert asyncio.run(Runner.run(agent, DESCRIBE)).final_output == ANNA

    @pytest.mark.parametrize("model", ["OpenAIResponsesModel"], indirect=True)
    @pytest.mark.parametrize("kept", ["previous_response", "conversation", "session"])
    def test_the_server_keeps_the_history(self, model, kept):
        from agents import Agent, ModelSettings, OpenAIConversationsSession, Runner, function_tool

        weather = Weather()

        @function_tool
        def get_weather(city: str) -> str:
            """Get the current weather in a city."""
            return weather.get_weather(city)

        agent = Agent("weather", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0))

        async def run() -> str:
            client = model._get_client()
            if kept == "previous_response":
                fields = {"auto_previous_response_id": True}
            elif kept == "conversation":
                fields = {"conversation_id": (await client.conversations.create()).id}
            else:
                fields = {"session": OpenAIConversationsSession(openai_client=client)}
            return (await Runner.run(agent, QUESTION, **fields)).final_output

        assert "21" in asyncio.run(run()) and weather.cities == ["Paris"]
