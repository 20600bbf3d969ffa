-- Takes pieces for a run of plain grabs, which is what most callers of a flash sale send: it does what
-- `take_pieces` in commands/grab.lua does, for all grabs at once. The records of the grabs and their answers
-- differ in few places, so the rest of them is packed once; packing each would cost three times as much as
-- deciding it.
--- @include "cost"
--- @include "records"
--- @include "calendar"
--- @include "decide"
--- @include "repeats"
--- @include "limits"
--- @include "offers"
--- @include "envelope"
--- @include "pieces"

-- Decides the first of the plain grabs of a call together, if nothing but themselves can refuse them. `plain`
-- is what the gate sends of them (commands/grab.lua). Returns their ids and users, as many as the call has
-- room for; the index of the first that was not decided; and for the reply, of an envelope the run, of pieces
-- nil and the packed rows.
local decide_plain
do
  -- What MessagePack has before a text of so many bytes.
  local HEADS = {}

  local function head_of(text)
    local head = HEADS[#text]
    if not head then
      head = string.sub(cmsgpack.pack(text), 1, -#text - 1)
      HEADS[#text] = head
    end
    return head
  end

  -- For each limit: the names of its counters for all users, the units that these have in the current window,
  -- when that ends, and what is to be written.
  local function read_counted(call, offer, campaign, users)
    local counted, windows = {}, windows_at(offer, call.now)
    for n, limit in ipairs(offer.rules.limits) do
      local window, ends_at = windows[n][1], windows[n][2]
      local of = limit.scope == 'campaign' and campaign.counters or offer.counters
      local names, counts, prefix = {}, {}, 'user/' .. limit.per .. '/'
      for i = 1, #users do names[i] = prefix .. users[i] end
      local stored, begins = redis.call('HMGET', of.key, unpack(names)), string.format('%d:', window)
      for i = 1, #users do
        counts[i] = 0
        if stored[i] then
          local its_window, units = string.match(stored[i], '^(%d+:)(%d+)$')
          if not units then error('the counter ' .. names[i] .. ' is damaged') end
          if its_window == begins then counts[i] = tonumber(units) end
        end
      end
      counted[n] = {limit = limit, names = names, counts = counts, window = window, ends_at = ends_at,
        begins = begins, made = of.made}
    end
    return counted
  end

  -- How many grabs can be carried out before the first that cannot. None, if an id occurs twice: the records
  -- that a later one is compared with are not written yet.
  local function count_takeable(call, offer, ids, users, campaign, counted)
    local has_id, fields = {}, {}
    for i = 1, #ids do
      if has_id[ids[i]] then return 0 end
      has_id[ids[i]], fields[i] = true, answer_field_of_grab(call, offer.name, ids[i])
    end
    local kept = redis.call('HMGET', campaign.answers_key, unpack(fields))
    local refused = stored_refusals(call, offer, ids, users, campaign)
    local most = math.min(#ids, offer.units_left)
    for i = 1, most do
      if kept[i] or refused[i] then return i - 1 end
      for n = 1, #counted do
        if counted[n].limit.max - counted[n].counts[i] < 1 then return i - 1 end
      end
    end
    return most
  end

  -- A function that appends a text, and returns its position.
  local function appender(texts)
    return function(text)
      texts[#texts + 1] = text
      return #texts
    end
  end

  -- The texts that make the row of an answer, and where those are that differ: seq, place and left, the units
  -- left of each limit, the number of a coupon.
  local function row_template(call, offer, counted)
    local texts, at = {}, {limits = {}}
    local add = appender(texts)
    local is_hold, details = offer.rules.hold_ms ~= nil, {}
    -- Made as take_pieces makes it: the order of its fields is that of the table.
    if #counted > 0 then details.limits = counted end
    if is_hold then
      hold_row(offer, {deadline = call.now + offer.rules.hold_ms, price = offer.rules.price or 0, held = 1},
        details)
    else
      coupon_row(offer, {place = 0}, {}, details)
    end
    add(string.sub(cmsgpack.pack({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), 1, 1))
    add(cmsgpack.pack(is_hold and CODE.held or CODE.granted))
    at.seq = add('')
    add(cmsgpack.pack(call.now, 1, 1))
    at.place = add('')
    add(cmsgpack.pack(0, 0))
    local fields = 0
    for _ in pairs(details) do fields = fields + 1 end
    -- A table without fields is packed as a list.
    add(fields == 0 and cmsgpack.pack({}) or string.char(128 + fields))
    for name, value in pairs(details) do
      add(cmsgpack.pack(name))
      if name == 'limits' then
        add(string.char(144 + #counted))
        for n, counter in ipairs(counted) do
          local limit = counter.limit
          add(string.char(150) .. cmsgpack.pack(limit.by, limit.per, limit.max))
          at.limits[n] = add('')
          add(cmsgpack.pack(counter.ends_at, limit.scope))
        end
      else
        local slot = add(cmsgpack.pack(value))
        if name == 'number' then at.number = slot end
      end
    end
    return texts, at
  end

  -- The texts that make the record of a grab, and where those are that differ: its user, its place, and the
  -- names of its counters, which are in it twice.
  local function grab_template(call, offer, counted)
    local grab = new_grab('', 1, {})
    grab.price = offer.rules.price or 0
    if offer.rules.hold_ms then
      grab.held, grab.deadline, grab.grace = 1, call.now + offer.rules.hold_ms, offer.rules.grace_ms
    else
      grab.taken = 1
    end
    local texts, at = {string.sub(pack_grab(grab), 1, 3)}, {names = {}}
    local add = appender(texts)
    local function add_counters()
      if #counted == 0 then return add(cmsgpack.pack({})) end
      add(string.char(144 + #counted))
      for n, counter in ipairs(counted) do
        add(string.char(147))
        at.names[n] = at.names[n] or {}
        table.insert(at.names[n], add(''))
        add(cmsgpack.pack(counter.window, counter.limit.scope == 'campaign' and 1 or 0))
      end
    end
    at.user = add('')
    at.place = add('')
    add(cmsgpack.pack(1, grab.held, grab.taken, grab.redeemed, grab.lapsed, grab.deadline, grab.grace,
      grab.extensions, grab.price, grab.status, grab.ended_seq, grab.ended_at, grab.confirmed_seq,
      grab.confirmed_at))
    add_counters()
    -- One entry: its unit, and the same counters.
    add(string.char(145, 146, 1))
    add_counters()
    add(cmsgpack.pack({}, {}))
    return texts, at
  end

  -- Notes the records of the grabs; returns their packed rows.
  local function keep_all(call, offer, ids, users, campaign, counted, grabs)
    local row, row_at = row_template(call, offer, counted)
    local record, record_at = grab_template(call, offer, counted)
    local named, deadline = string.char(146) .. cmsgpack.pack(offer.name), nil
    local pack, concat, made, rows = cmsgpack.pack, table.concat, campaign.made, {}
    local code = offer.rules.hold_ms and CODE.held or CODE.granted
    if offer.rules.hold_ms then
      deadline = string.format('%d', call.now + offer.rules.hold_ms + offer.rules.grace_ms)
    end
    for i = 1, grabs do
      local user, seq, place = users[i], call.seq + i, offer.places + i
      row[row_at.seq], row[row_at.place] = pack(seq), pack(place, offer.units_left - i)
      if row_at.number then row[row_at.number] = pack(place) end
      record[record_at.user], record[record_at.place] = head_of(user) .. user, pack(place)
      for n = 1, #counted do
        local counter, slots = counted[n], record_at.names[n]
        local name, units, counters = counter.names[i], counter.counts[i] + 1, counter.made
        counters[#counters + 1] = name
        counters[#counters + 1] = counter.begins .. string.format('%d', units)
        row[row_at.limits[n]] = pack(counter.limit.max - units)
        local packed = head_of(name) .. name
        record[slots[1]], record[slots[2]] = packed, packed
      end
      rows[i] = concat(row)
      made[2 * i - 1] = answer_field_of_grab(call, offer.name, ids[i])
      made[2 * i] = pack_answer(code, seq, call.now, 0, 0, PLAIN, named .. rows[i])
      offer.grabs_made[2 * i - 1], offer.grabs_made[2 * i] = ids[i], concat(record)
      if deadline then
        offer.holds_made[2 * i - 1], offer.holds_made[2 * i] = deadline, offer.name .. '/' .. ids[i]
      end
    end
    return rows
  end

  -- Takes a piece for each grab before the first that gets none. Returns the index of that grab, and the
  -- packed rows of the others. Each costs `grab_cost`. `texts` is that of grant_run.
  local function take_run(call, offer, ids, users, campaign, grab_cost, texts)
    local counted = read_counted(call, offer, campaign, users)
    local grabs = count_takeable(call, offer, ids, users, campaign, counted)
    spend(grab_cost * grabs + COST.counter * (1 + #counted) * (#ids - grabs))
    if grabs == 0 then return 1, {} end
    int(offer.rules.price or 0)
    local rows = keep_all(call, offer, ids, users, campaign, counted, grabs)
    local type = offer.rules.hold_ms and 'grab.held' or 'grab.granted'
    end_whole_run(call, offer, type, ids, users, grabs, texts)
    call.seq, offer.changed, offer.offer_seq = call.seq + grabs, true, offer.offer_seq + grabs
    offer.places = offer.places + grabs
    move_units(offer, -grabs)
    if offer.rules.hold_ms then offer.held = offer.held + grabs end
    return grabs + 1, rows
  end

  -- Whether a plain grab of this offer of pieces can only be refused because its id is known, a limit of its
  -- user is reached, or no unit is left.
  local function is_plain_of_pieces(call, offer)
    if not call.has_own_ids or offer.rules.codes or offer.queue_length > 0 or offer.units_left == 0 then
      return false
    end
    for _, limit in ipairs(offer.rules.limits) do
      if limit.by ~= 'user' then return false end
    end
    return true
  end

  -- The values in an argument that has '","' between them, as in an event.
  local function values_of(text, width, grabs)
    if type(width) == 'number' then return unpack_list('c' .. width, 'xxx', text, grabs) end
    local values = {struct.unpack(width, text)}
    values[grabs + 1] = nil
    return values
  end

  function decide_plain(call, offer, campaign, plain)
    local grabs, ids_width, users_width = unpack(plain)
    local ids, users = values_of(ARGV[7], ids_width, grabs), values_of(ARGV[8], users_width, grabs)
    if not is_plain(call, offer) or (offer.pieces and not is_plain_of_pieces(call, offer)) then
      return ids, users, 1
    end
    local grab_cost = COST.plain_byte * (#ARGV[7] + #ARGV[8]) / grabs
      + (offer.pieces and COST.plain_piece + COST.plain_counter * #offer.rules.limits or COST.plain_grab)
    local most = math.max(1, math.floor(COST.call_max / grab_cost))
    for i = grabs, most + 1, -1 do ids[i], users[i] = nil, nil end
    local texts = {ARGV[7], ARGV[8], grabs}
    if not offer.pieces then
      return ids, users, grant_run(call, offer, ids, users, campaign, grab_cost, texts)
    end
    local first, rows = take_run(call, offer, ids, users, campaign, grab_cost, texts)
    return ids, users, first, nil, rows
  end
end
