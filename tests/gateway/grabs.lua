-- Grabs of one offer, sent by wrk (`test_wrk.py`): each of a new user with its own key, and each tenth
-- request is the one before once more, as of a double click.
--
-- Arguments after `--`: the offer; a stem of keys and users that no other run has; and a file. Each thread
-- writes the answers of status 2xx to `<file>.<thread>`, one a line. At the end, wrk prints what came back,
-- as one line of JSON.

local threads = {}

function setup(thread)
  thread:set("number", #threads)
  threads[#threads + 1] = thread
end

function init(arguments)
  path = "/v1/offers/" .. arguments[1] .. "/grabs"
  stem = arguments[2] .. "-" .. number
  sent, users, good, bad, worst = 0, 0, 0, 0, 0
  answers = assert(io.open(arguments[3] .. "." .. number, "w"))
  -- The file is never closed: a line is written at once.
  answers:setvbuf("line")
end

function request()
  sent = sent + 1
  if sent % 10 ~= 0 then
    users = users + 1
  end
  local name = stem .. "-" .. users
  local headers = { ["Content-Type"] = "application/json", ["Idempotency-Key"] = "k" .. name }
  return wrk.format("POST", path, headers, '{"user":"u' .. name .. '"}')
end

function response(status, _, body)
  worst = math.max(worst, status)
  if status >= 200 and status < 300 then
    good = good + 1
    answers:write(body, "\n")
  else
    bad = bad + 1
  end
end

function done(summary, latency)
  local all = { good = 0, bad = 0, worst = 0 }
  for _, thread in ipairs(threads) do
    all.good = all.good + thread:get("good")
    all.bad = all.bad + thread:get("bad")
    all.worst = math.max(all.worst, thread:get("worst"))
  end
  local errors = summary.errors
  print(string.format(
    '{"good": %d, "bad": %d, "worst_status": %d, "seconds": %.3f, "p50_ms": %.1f, "p99_ms": %.1f, '
      .. '"socket_errors": %d}',
    all.good, all.bad, all.worst, summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, errors.connect + errors.read + errors.write + errors.timeout
  ))
end
