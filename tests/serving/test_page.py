"""The page at / in a real browser: Debian's chromium, if it is installed (scripts/setup_browser)."""

import dataclasses
import re
import threading
import time
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from spmd_tasks.inputs import ChatTemplate
from tests import browser as chromium
from tests.serving.fake_engine import TOKENIZER, FakeEngine
from tests.serving.served import MODEL, serving
from tests.serving.test_tool_calls import FINAL, HARMONY_ECHO, HM, tokenizer  # noqa: F401

pytestmark = chromium.needed


class SlowEngine(FakeEngine):
  """Its texts can be seen to grow."""

  def step(self, *args, **kwargs):
    time.sleep(0.02)
    return super().step(*args, **kwargs)


@pytest.fixture(scope='module')
def served():
  with serving(SlowEngine(num_slots=2, max_len=1000)) as served:
    yield served


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
  with chromium.opened(tmp_path_factory.mktemp('chromium')) as browser:
    yield browser


@pytest.fixture
def page(browser, served):
  browser.get(served.url)
  return Page(browser)


class Page:
  """The page's elements by their ids."""

  def __init__(self, browser):
    self.browser = browser

  def __getitem__(self, name):
    return self.browser.find_element(By.ID, name)

  def fill(self, **values):
    for name, value in values.items():
      self[name].clear()
      self[name].send_keys(str(value))

  def wait(self, condition):
    return WebDriverWait(self.browser, 10, poll_frequency=0.01).until(lambda _: condition())

  def is_idle(self):
    return self['go'].is_enabled() and not self['stop'].is_enabled()


def shows_cut(element):
  mark = "return getComputedStyle(arguments[0], '::after').content"
  return 'cut off at the token limit' in element.parent.execute_script(mark, element)


def test_a_prompt_is_answered_piece_by_piece(page):
  assert page['name'].text == page.browser.title == 'fake.Model'
  page.fill(prompt='hello', max_tokens=30)
  page['go'].click()
  piece = page.wait(lambda: page['new'].text)
  assert not page.is_idle()
  page.wait(page.is_idle)
  text = page['new'].text
  assert text.startswith(piece)
  assert len(piece) < len(text)
  assert text == ('hello' * 6)[: len(text)]
  assert page['given'].text == 'hello'
  status = page['status'].text
  assert status.startswith('30 tokens, ')
  assert re.search(r', \d+\.\d tokens/s, first token after \d+ ms: ', status)
  assert status.endswith(': reached the token limit')
  assert shows_cut(page['new'])
  assert page.browser.get_log('browser') == []  # also nothing that the content security policy refused


def test_markup_is_shown_and_not_run(page):
  markup = '<script>document.title="run"</script><img src=x onerror=\'document.title="run"\'>'
  page.fill(prompt=markup, max_tokens=len(markup) + 1)
  page['go'].click()
  page.wait(page.is_idle)
  assert markup[:-1] in page['new'].text
  assert page['given'].text == markup
  assert page.browser.find_elements(By.TAG_NAME, 'img') == []
  assert page.browser.title == 'fake.Model'


def test_the_key_works_as_a_password_for_the_page(browser):
  with serving(api_key='secret') as served:
    at = urlsplit(served.url)
    browser.get(f'http://anyone:secret@{at.netloc}/')
    page = Page(browser)
    page.fill(prompt='hi', max_tokens=3)
    page['go'].click()
    page.wait(page.is_idle)
    assert page['error'].text == ''
    assert page['status'].text.startswith('3 tokens')


def test_a_model_with_a_chat_template_chats(browser):
  """The fake repeats its prompt, which is the whole conversation."""
  template = ChatTemplate.from_turns('[{role}]{content}', reply='[assistant]', stop=())
  with serving(max_len=1000, chat_template=template) as served:
    browser.get(served.url)
    page = Page(browser)
    for number, said in enumerate(('<b>hi</b>', 'more')):
      page.fill(prompt=said, max_tokens=60 + 60 * number)
      page['go'].click()
      page.wait(page.is_idle)
      assert page['error'].text == ''
    turns = [(turn.get_attribute('class'), turn.text) for turn in page['given'].find_elements(By.TAG_NAME, 'div')]
    assert [role for role, _ in turns] == ['user', 'assistant cut'] * 2  # the fake never ends an answer
    first, second = '[user]<b>hi</b>[assistant]', turns[1][1]
    assert turns[0][1] == '<b>hi</b>'
    assert second == (first * 9)[: len(second)]
    assert turns[3][1].startswith(f'{first}{second}[user]more[assistant]'[:100])
    page.fill(max_tokens=5000)
    page['prompt'].send_keys('again')
    page['go'].click()
    page.wait(lambda: page['error'].text)
    assert len(page['given'].find_elements(By.TAG_NAME, 'div')) == 4  # what was refused is no turn
    assert page['prompt'].get_attribute('value') == 'again'
    page['anew'].click()
    assert page['given'].text == page['error'].text == ''


def test_reasoning_is_shown_and_not_sent_back(browser, tokenizer):  # noqa: F811
  """The fake repeats all messages of the conversation, and each answer's reasoning is shown beside it."""
  template = ChatTemplate(template=HARMONY_ECHO, writes_bos=True)
  with serving(max_len=512, chat_template=template, tokenizer=tokenizer) as served:
    browser.get(served.url)
    page = Page(browser)
    for said in (HM + FINAL, 'x'):
      page.fill(prompt=said, max_tokens=200)
      page['go'].click()
      page.wait(page.is_idle)
      assert page['error'].text == ''
    turns = [(turn.get_attribute('class'), turn.text) for turn in page['given'].find_elements(By.TAG_NAME, 'div')]
    page.fill(prompt='more', max_tokens=12)
    page['go'].click()
    page.wait(page.is_idle)
    assert page['prompt'].get_attribute('value') == 'more'  # the answer was cut off before its reasoning ended
    assert len(page['given'].find_elements(By.TAG_NAME, 'div')) == len(turns)
    assert page['thought'].text == 'Hm'
    assert shows_cut(page['new'])
  assert [turn for turn in turns if turn[0] != 'user'] == [
    ('thought', 'Hm <b>.'),
    ('assistant', '7 °C'),
    ('thought', 'Hm <b>.'),
    ('assistant', '7 °C7 °Cx'),
  ]


def test_the_page_waits_until_the_server_is_ready(browser):
  warm = threading.Event()
  engine = FakeEngine()
  engine.warm_up = lambda: warm.wait(30)
  with serving(engine, wait=False) as served:
    browser.get(served.url)
    page = Page(browser)
    page.wait(lambda: 'warming up' in page['status'].text)
    page.fill(prompt='early', max_tokens=3)
    page['prompt'].send_keys(Keys.CONTROL, Keys.ENTER)
    assert not page['go'].is_enabled()
    assert page['given'].text == page['error'].text == ''
    warm.set()
    page.wait(page.is_idle)
    assert page['prompt'].get_attribute('value') == 'early'
    page['go'].click()
    page.wait(lambda: page['status'].text.startswith('3 tokens'))
  page['go'].click()  # the server is gone
  page.wait(lambda: 'cannot be reached' in page['error'].text)
  assert not page['go'].is_enabled()


def test_keys_generate_and_stop(page):
  page.fill(prompt='hello', max_tokens=900)
  page['prompt'].send_keys(Keys.ENTER, 'x')  # a line of the prompt, not its end
  assert page['prompt'].get_attribute('value') == 'hello\nx'
  assert page.is_idle()
  page['prompt'].send_keys(Keys.CONTROL, Keys.ENTER)
  page.wait(lambda: page['new'].text)
  page['prompt'].send_keys(Keys.ESCAPE)
  page.wait(page.is_idle)
  assert page['status'].text == 'stopped'
  assert page['given'].text == 'hello\nx'


def test_an_example_is_one_click_away_and_enter_sends_a_message(browser):
  template = ChatTemplate.from_turns('[{role}]{content}', reply='[assistant]', stop=())
  with serving(max_len=1000, chat_template=template) as served:
    browser.get(served.url)
    page = Page(browser)
    example = page['examples'].find_element(By.TAG_NAME, 'button')
    text = example.text
    example.click()
    assert page['prompt'].get_attribute('value') == text
    assert browser.switch_to.active_element.get_attribute('id') == 'prompt'
    page['prompt'].send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL, 'now', Keys.ENTER)
    page.wait(lambda: page['status'].text.endswith(': reached the token limit'))
    page.wait(page.is_idle)
    assert page['given'].find_element(By.CLASS_NAME, 'user').text == f'{text}\nnow'
    assert not page['examples'].is_displayed()
    # Without a number of tokens, an answer takes all that is left of the context, and is marked where it is cut off.
    num_tokens = int(page['status'].text.partition(' tokens')[0])
    assert num_tokens == 999 - len(TOKENIZER.encode(f'[user]{text}\nnow[assistant]'))
    assert shows_cut(page['given'].find_element(By.CLASS_NAME, 'assistant'))


@pytest.mark.parametrize('max_tokens', [None, 20])
def test_a_continued_text_takes_the_tokens_that_the_server_allows(browser, max_tokens):
  settings = dataclasses.replace(MODEL.settings, max_tokens=max_tokens)
  with serving(max_len=100, model=dataclasses.replace(MODEL, max_len=100, settings=settings)) as served:
    browser.get(served.url)
    page = Page(browser)
    page.fill(prompt='hello')
    page['go'].click()
    page.wait(lambda: page['status'].text.startswith(f'{max_tokens or 50} tokens'))
    page.wait(page.is_idle)
    page.fill(prompt='again', max_tokens=80)
    page['go'].click()
    page.wait(lambda: page['status'].text.startswith('80 tokens'))


@pytest.mark.parametrize('width', [1400, pytest.param(500, marks=pytest.mark.exhaustive), 320])
def test_the_input_field_is_below_the_text_and_fits(page, browser, width):
  browser.execute_cdp_cmd(
    'Emulation.setDeviceMetricsOverride', {'width': width, 'height': 700, 'deviceScaleFactor': 1, 'mobile': width < 700}
  )
  try:
    browser.refresh()
    if width < 700:
      assert not page['settings'].is_displayed()
      browser.find_element(By.TAG_NAME, 'summary').click()
    page.fill(prompt=f'{"word" * 40}\n\n\n', max_tokens=150)  # taller and wider than the window
    page['go'].click()
    page.wait(lambda: page['new'].text)
    page.wait(page.is_idle)
    assert page['prompt'].rect['y'] > page['text'].rect['y']
    inner = 'document.documentElement.scrollWidth - document.documentElement.clientWidth'
    assert browser.execute_script(f'return {inner}') == 0  # nothing to scroll sideways
    in_view = (
      'const at = e => e.getBoundingClientRect(); return [at(arguments[0]).bottom, at(arguments[1]).top, innerHeight]'
    )
    end_of_text, top_of_form, height = browser.execute_script(in_view, page['new'], page['form'])
    assert end_of_text <= top_of_form + 1
    assert top_of_form < height
  finally:
    browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
