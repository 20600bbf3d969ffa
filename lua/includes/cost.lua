-- What a call may cost. A script blocks its server, so a call does a bounded sum of work; what does not fit
-- goes into the next call. A call ends between two commands (holds, offers, events), never within one: what
-- is decided does not depend on where calls end. Costs are µs of Redis' thread on a quiet machine, see
-- docs/performance.md. The first command of a call is always carried out.

local COST = {
  call_max = 2500,
  command = 5, -- its arguments, what is kept under its id, its reply
  plain_grab = 4, -- of a run of plain grabs: all of it, and each byte of the arguments of such a run:
  plain_byte = 0.01,
  offer = 40, -- read and written back, with its rules
  event = 6, -- its text, and a line of the outbox
  grab_read = 3, -- of pieces; and each byte of its record, read and written back:
  record_byte = 0.01,
  grab = 6, -- written back, with its deadline
  waiter = 8, -- who leaves a queue
  asked = 1, -- what a grab in a queue asks for, read; and each byte of its record:
  asked_byte = 0.0025,
  considered = 0.3, -- … looked at
  counter = 3, -- of a limit
  scanned = 2, -- a record of a campaign looked at, whether its offer is there
  item = 1, -- of a list: a code, a user
  -- Each byte counts as well, since every string that Lua makes is hashed whole (1.4 ns a byte):
  argument_byte = 0.005, -- of what the call was sent, read and unpacked
  line_byte = 0.003, -- of an event's text: joined, and appended to the outbox
  -- of an answer kept whole: packed, kept and replied; or read again, unpacked and replied
  answer_byte = 0.011,
  -- of a counter's name: joined, looked up, and packed into the record of its grab, twice
  counter_byte = 0.02,
  listed_byte = 0.01, -- of codes: read from their list, joined, and packed into the record of their grab
  span = 0.3, -- of opening hours
  part_byte = 0.0015, -- of the parts of an envelope
}

local spend, is_spent, bytes_of
do
  local cost = 0

  function spend(units)
    cost = cost + units
  end

  -- Whether the call has no room for anything more, or for what is known to cost so much more.
  function is_spent(more)
    return cost + (more or 0) >= COST.call_max
  end

  -- The bytes of a list of texts.
  function bytes_of(texts)
    local bytes = 0
    for i = 1, #texts do bytes = bytes + #texts[i] end
    return bytes
  end
end
