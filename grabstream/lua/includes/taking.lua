-- Takes pieces for the plain grabs of a call, as most callers of a flash sale send: it does what
-- `take_pieces` in commands/grab.lua does, for all grabs at once. The records of the grabs and their answers
-- differ in few places, so the rest of them is packed once; packing each would cost three times as much as
-- deciding it. Most users have the same counters, so what these become is made once, too.
--- @include "cost"
--- @include "packed_values"
--- @include "calendar"
--- @include "decide"
--- @include "repeats"
--- @include "limits"
--- @include "offers"
--- @include "envelope"
--- @include "pieces"

-- Decides the first of the plain grabs of a call together, if nothing but themselves can refuse them. `plain`
-- is their form from the gate (commands/grab.lua). Returns their ids and users, as many as the call has room
-- for; the index of the first that was not decided; and for the reply, of an envelope the run, of pieces nil
-- and the packed rows.
local decide_plain
do
  local take_run
  do
    -- Notes the records of the grabs; returns their packed rows.
    local keep_all
    do
      -- The texts that make the row of an answer, and the places of those that differ: seq, place, left, the
      -- units left of each limit, the number of a coupon.
      local function row_template(call, offer)
        local texts, ends_with_place = {''}, false
        -- Adds a text that all rows have.
        local function add(text)
          if ends_with_place then texts[#texts + 1], ends_with_place = '', false end
          texts[#texts] = texts[#texts] .. text
        end
        -- Adds a place for a text; returns its index.
        local function add_place()
          texts[#texts + 1], ends_with_place = '', true
          return #texts
        end
        local at, limits = {limits = {}}, offer.rules.limits
        local is_hold, details = offer.rules.hold_ms ~= nil, {}
        -- Made as take_pieces makes it: the order of its fields is that of the table.
        if #limits > 0 then details.limits = limits end
        if is_hold then
          local deadline = call.now + offer.rules.hold_ms
          hold_row(offer, {deadline = deadline, price = offer.rules.price or 0, held = 1}, details)
        else
          coupon_row(offer, {place = 0}, {}, details)
        end
        add(string.sub(cmsgpack.pack({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), 1, 1))
        add(cmsgpack.pack(is_hold and CODE.held or CODE.granted))
        at.seq = add_place()
        add(cmsgpack.pack(call.now, 1, 1))
        at.place, at.left = add_place(), add_place()
        add(cmsgpack.pack(0, 0))
        local fields = 0
        for _ in pairs(details) do fields = fields + 1 end
        -- A table without fields is packed as a list.
        add(fields == 0 and cmsgpack.pack({}) or string.char(128 + fields))
        for name, value in pairs(details) do
          add(cmsgpack.pack(name))
          if name == 'limits' then
            add(string.char(144 + #limits))
            for n, limit in ipairs(limits) do
              add(string.char(150) .. cmsgpack.pack(limit.by, limit.per, limit.max))
              at.limits[n] = add_place()
              add(cmsgpack.pack(windows_at(offer, call.now)[n][2], limit.scope))
            end
          elseif name == 'number' then
            at.number = add_place()
          else
            add(cmsgpack.pack(value))
          end
        end
        return texts, at
      end

      -- The common parts of all records before the user, and after the place. (The names of its counters end
      -- before the user.)
      local function around_grab(call, offer)
        local under = {}
        for n, limit in ipairs(offer.rules.limits) do
          under[n] = {'user/' .. limit.per .. '/', windows_at(offer, call.now)[n][1],
            limit.scope == 'campaign' and 1 or 0}
        end
        local grab = new_grab('', 1, under)
        grab.price = offer.rules.price or 0
        if offer.rules.hold_ms then
          grab.held, grab.deadline, grab.grace = 1, call.now + offer.rules.hold_ms, offer.rules.grace_ms
        else
          grab.taken = 1
        end
        -- Here, its user and its place take a byte each.
        local packed = pack_grab(grab)
        return string.sub(packed, 1, 3), string.sub(packed, 6)
      end

      -- Counts a grab in each limit: notes the new counts, and enters the units left in the texts of its row.
      local function enter_counters(counted, i, row, row_slots)
        for h = 1, #counted do
          local hash = counted[h]
          local state, made, indexes = hash.next[hash.texts[i]], hash.made, hash.indexes
          local last = #made
          made[last + 1], made[last + 2] = hash.fields[i], state.text
          for k = 1, #indexes do row[row_slots[indexes[k]]] = state.lefts[indexes[k]] end
        end
      end

      function keep_all(call, offer, ids, users, fields, campaign, counted, grabs)
        local row, row_at = row_template(call, offer)
        local before, after = around_grab(call, offer)
        local concat, rows = table.concat, {}
        local made, made_grabs = campaign.made, offer.grabs_made
        local hold_ms, deadline = offer.rules.hold_ms, nil
        local next_seq_packed = packer_of('numbers', call.seq + 1, 1)
        local next_place = packer_of('numbers', offer.places + 1, 1)
        local next_left = packer_of('numbers', offer.units_left - 1, -1)
        local code = hold_ms and CODE.held or CODE.granted
        local pack_next = packer_of('rows', offer.name, code, call.seq + 1, call.now)
        if hold_ms then deadline = string.format('%d', call.now + hold_ms + offer.rules.grace_ms) end
        for i = 1, grabs do
          local user, place = users[i], next_place()
          row[row_at.seq], row[row_at.place], row[row_at.left] = next_seq_packed(), place, next_left()
          if row_at.number then row[row_at.number] = place end
          enter_counters(counted, i, row, row_at.limits)
          rows[i] = concat(row)
          made[2 * i - 1], made[2 * i] = fields[i], pack_next(rows[i])
          made_grabs[2 * i - 1] = ids[i]
          made_grabs[2 * i] = before .. packed_head(#user) .. user .. place .. after
          if deadline then
            offer.holds_made[2 * i - 1], offer.holds_made[2 * i] = deadline, offer.name .. '/' .. ids[i]
          end
        end
        return rows
      end
    end

    -- For each hash that an offer's limits count in, that of the offer and that of its campaign: the fields
    -- of all users, their old and new contents, and the writes.
    local function read_counted(call, offer, campaign, users)
      local counted, indexes = {}, {{}, {}}
      for n, limit in ipairs(offer.rules.limits) do
        local of = indexes[limit.scope == 'campaign' and 2 or 1]
        of[#of + 1] = n
      end
      for i, counters in ipairs({offer.counters, campaign.counters}) do
        if #indexes[i] > 0 then
          local fields = {}
          for j = 1, #users do fields[j] = 'user/' .. users[j] end
          counted[#counted + 1] = {fields = fields, texts = redis.call('HMGET', counters.key, unpack(fields)),
            next = next_counters(offer, call.now, indexes[i]), indexes = indexes[i], made = counters.made}
        end
      end
      return counted
    end

    -- How many grabs can be executed before the first that cannot, and the fields of their answers. None, if
    -- an id occurs twice: the records that a later one is compared with are not written yet.
    local function count_takeable(call, offer, ids, users, campaign, counted)
      local has_id, fields = {}, {}
      for i = 1, #ids do
        if has_id[ids[i]] then return 0 end
        has_id[ids[i]], fields[i] = true, answer_field_of_grab(offer.name, ids[i])
      end
      local kept = are_answered(campaign, fields)
      local refused = stored_refusals(offer, ids, users)
      local most = math.min(#ids, offer.units_left)
      for i = 1, most do
        if kept[i] or refused[i] then return i - 1, fields end
        for h = 1, #counted do
          if not counted[h].next[counted[h].texts[i]].is_left then return i - 1, fields end
        end
      end
      return most, fields
    end

    -- Takes a piece for each grab before the first that gets none. Returns the index of that grab, and the
    -- packed rows of the others. Each costs `grab_cost`. `texts` is that of grant_run.
    function take_run(call, offer, ids, users, campaign, grab_cost, texts)
      local counted = read_counted(call, offer, campaign, users)
      local grabs, fields = count_takeable(call, offer, ids, users, campaign, counted)
      spend(grab_cost * grabs + COST.counter * (1 + #counted) * (#ids - grabs))
      if grabs == 0 then return 1, {} end
      int(offer.rules.price or 0)
      local rows = keep_all(call, offer, ids, users, fields, campaign, counted, grabs)
      local type = offer.rules.hold_ms and 'grab.held' or 'grab.granted'
      end_whole_run(call, offer, type, ids, users, grabs, texts)
      call.seq, offer.changed, offer.offer_seq = call.seq + grabs, true, offer.offer_seq + grabs
      offer.places = offer.places + grabs
      move_units(offer, -grabs)
      if offer.rules.hold_ms then offer.held = offer.held + grabs end
      return grabs + 1, rows
    end
  end

  -- Whether all limits of an offer count by user. Under others, a grab without the attribute is invalid.
  local function counts_by_user(offer)
    for _, limit in ipairs(offer.rules.limits) do
      if limit.by ~= 'user' then return false end
    end
    return true
  end

  -- The refusal, as a row, that each plain grab of an offer gets without a remembered answer; or nil.
  -- `refusal_of_all` is the one that all grabs get, from any sender.
  local function refusal_of_plain(call, offer, refusal_of_all)
    if offer.total < 1 or not counts_by_user(offer) then return nil end
    if refusal_of_all or not offer.pieces or offer.rules.audience or #offer.rules.limits > 0 then
      return refusal_of_all
    end
    return available(offer) == 0 and {code = CODE.sold_out, at = call.now} or nil
  end

  -- Refuses the plain grabs of a call with this row. Stops before the first with a remembered answer. Returns
  -- the index of that grab, and the packed rows of the others. Each costs `grab_cost`. It does what `keep` in
  -- commands/grab.lua does, for all grabs at once.
  local function refuse_plain(call, offer, ids, users, campaign, row, grab_cost)
    local name, fields, answers = offer.name, {}
    for i = 1, #ids do fields[i] = refusal_field_of_grab(name, users[i], ids[i]) end
    if offer.pieces then
      local answer_fields = {}
      for i = 1, #ids do answer_fields[i] = answer_field_of_grab(name, ids[i]) end
      answers = are_answered(campaign, answer_fields)
    else
      answers = redis.call('HMGET', KEYS[offer.base + KEY.users], unpack(users))
    end
    local refusals, new = redis.call('HMGET', KEYS[3], unpack(fields)), #ids
    for i = 1, #ids do
      if answers[i] or refusals[i] then
        new = i - 1
        break
      end
    end
    spend(grab_cost * new + COST.counter * (#ids - new))
    local rows, packed = {}, cmsgpack.pack(list_row(row))
    local pack_next = packer_of('refusals', name, row.code, call.now)
    local is_kept = not has_retired(call, name)
    for i = 1, new do
      rows[i] = packed
      if is_kept then remember(call, fields[i], pack_next(users[i])) end
    end
    count_refusals(call, row.code, name, new)
    return new + 1, rows
  end

  -- Whether a plain grab of an offer that takes grabs can only be refused because its id is known, its user
  -- has a part or has reached a limit, or nothing is left.
  local function is_takeable(call, offer)
    if offer.rules.audience or next(offer.loads) then return false end
    if not offer.pieces then return true end
    if offer.rules.codes or offer.queue_length > 0 or offer.units_left == 0 then return false end
    return counts_by_user(offer)
  end

  function decide_plain(call, offer, campaign, plain)
    local grabs, ids_width, users_width = unpack(plain)
    local ids, users = values_of(ARGV[7], ids_width, grabs), values_of(ARGV[8], users_width, grabs)
    if not offer then return ids, users, 1 end
    local refusal_of_all = refusal_of_offer(offer, call.now)
    local refusal = refusal_of_plain(call, offer, refusal_of_all)
    if not refusal and (refusal_of_all or not is_takeable(call, offer)) then return ids, users, 1 end
    local is_piece = offer.pieces and not refusal
    local grab_cost = COST.plain_byte * (#ARGV[7] + #ARGV[8]) / grabs
      + (is_piece and COST.plain_piece + COST.plain_counter * #offer.rules.limits or COST.plain_grab)
    local most = math.max(1, math.floor(COST.call_max / grab_cost))
    for i = grabs, most + 1, -1 do ids[i], users[i] = nil, nil end
    if refusal then
      local first, rows = refuse_plain(call, offer, ids, users, campaign, refusal, grab_cost)
      return ids, users, first, nil, rows
    end
    local texts = {ARGV[7], ARGV[8], grabs}
    if not offer.pieces then
      return ids, users, grant_run(call, offer, ids, users, grab_cost, texts)
    end
    local first, rows = take_run(call, offer, ids, users, campaign, grab_cost, texts)
    return ids, users, first, nil, rows
  end
end
