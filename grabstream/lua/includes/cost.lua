-- What a call may cost. A script blocks its server, so a call does a bounded amount of work, and the rest
-- goes into the next call. A call ends between two commands (or holds, offers, events), never within one;
-- decisions do not depend on where calls end. Costs are in µs of the Redis thread on a quiet machine, see
-- docs/performance.md. The first command of a call is always executed.

local COST = {
  call_max = 2500,
  command = 5, -- reading its arguments and the record under its id, and its reply
  plain_grab = 4, -- one of the plain grabs of a call, with everything; and each byte of their arguments:
  plain_byte = 0.01,
  plain_piece = 12, -- the same of an offer of pieces; and each limit:
  plain_counter = 4,
  plain_payment = 4, -- a confirmation with others; and what is read before: each record, and its bytes
  read_ahead = 0.8,
  read_byte = 0.003,
  offer = 40, -- reading and writing an offer, with its rules
  event = 6, -- an event's text, and its line in the outbox
  grab_read = 3, -- reading a grab of pieces; and each byte of its record, read and written:
  record_byte = 0.01,
  grab = 6, -- writing a grab, with its deadline
  waiter = 8, -- removing a grab from the queue
  asked = 1, -- reading the quantity that a queued grab asks for; and each byte of its record:
  asked_byte = 0.0025,
  considered = 0.3, -- testing whether a queued grab can be served
  counter = 3, -- a counter of a limit
  scanned = 2, -- reading a record of a campaign and testing whether its offer exists
  item = 1, -- an item of a list: a code, a user
  -- Bytes count too, since Lua hashes every string that it makes (1.4 ns a byte):
  argument_byte = 0.005, -- arguments of the call: read and unpacked
  line_byte = 0.003, -- an event's text: joined, and appended to the outbox
  -- an answer kept whole: packed, kept and replied; or read again, unpacked and replied
  answer_byte = 0.011,
  -- a counter's name: joined, looked up, and packed into the record of its grab, twice
  counter_byte = 0.02,
  listed_byte = 0.01, -- codes: read from their list, joined, and packed into the record of their grab
  span = 0.3, -- a span of opening hours
  part_byte = 0.0015, -- the parts of an envelope
}

-- The cost of this call up to now.
--- @each_call
local cost = 0

local function spend(microseconds)
  cost = cost + microseconds
end

-- Whether the call may do no further work. `estimate` is the cost, if known, of work that is planned.
local function is_spent(estimate)
  return cost + (estimate or 0) >= COST.call_max
end

-- The number of bytes in a list of texts.
local function bytes_of(texts)
  local bytes = 0
  for i = 1, #texts do bytes = bytes + #texts[i] end
  return bytes
end
