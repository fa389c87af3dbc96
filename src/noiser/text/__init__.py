"""Prompts and chats as tokens with their characters; units and sources in them."""

from noiser.text.chat import check_messages as check_messages
from noiser.text.chat import find_action as find_action
from noiser.text.chat import is_missing as is_missing
from noiser.text.chat import one_text_each as one_text_each
from noiser.text.chat import part_texts as part_texts
from noiser.text.documents import read_documents as read_documents
from noiser.text.documents import with_leads as with_leads
from noiser.text.encoding import Encoding as Encoding
from noiser.text.encoding import as_prompt as as_prompt
from noiser.text.encoding import encode as encode
from noiser.text.encoding import encode_target as encode_target
from noiser.text.encoding import extend as extend
from noiser.text.segments import checked_spans as checked_spans
from noiser.text.segments import end_of_word as end_of_word
from noiser.text.segments import sentence_spans as sentence_spans
from noiser.text.segments import visible_part as visible_part
from noiser.text.segments import word_spans as word_spans
from noiser.text.sources import TEMPLATE as TEMPLATE
from noiser.text.sources import begin_of_sources as begin_of_sources
from noiser.text.sources import find_sources as find_sources
from noiser.text.sources import place_sources as place_sources
from noiser.text.sources import without_sources as without_sources
from noiser.text.tokens import token_texts as token_texts
from noiser.text.units import make_target_spans as make_target_spans
from noiser.text.units import make_units as make_units
from noiser.text.units import split_unit as split_unit
